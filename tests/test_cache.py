"""The growing cache holds what transformers' own holds."""
import pytest
import torch
from conftest import FAMILIES, tiny_model
from transformers import DynamicCache

from oar import cache as growing


def states(seed: int, rows: int, columns: int):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, columns, 3, generator=draw), torch.randn(rows, 2, columns, 3, generator=draw)


def test_updates_selections_and_repeats_follow_the_dynamic_cache():
    ours, theirs = growing.growing_cache(), DynamicCache()
    for cache in (ours, theirs):
        cache.update(*states(0, 2, 5), 0)
        cache.batch_repeat_interleave(3)
        for step in range(1, growing.ROOM + 10):                     # past the room of a buffer
            rows = 6 if step < 20 else 2
            if step == 20:
                cache.batch_select_indices(torch.tensor([4, 1]))
            cache.update(*states(step, rows, 1), 0)
    assert ours.get_seq_length() == theirs.get_seq_length() == 5 + growing.ROOM + 9
    assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys) and torch.equal(ours.layers[0].values, theirs.layers[0].values)


def test_a_prefix_is_a_copy_with_room():
    clean = DynamicCache()
    clean.update(*states(0, 3, 7), 0)
    before = clean.layers[0].keys.clone()
    part = growing.prefix_cache(clean, [2, 0, 2], 4, 2)
    assert torch.equal(part.layers[0].keys, before[[2, 0, 2], :, :4])
    keys, _ = part.update(*states(1, 3, 2), 0)
    assert keys.shape[2] == 6 and torch.equal(keys[:, :, :4], before[[2, 0, 2], :, :4]) and torch.equal(clean.layers[0].keys, before)
    address = part.layers[0].buffers[0].data_ptr()
    assert keys.data_ptr() == address                                # in place: the room was enough


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_model_reads_the_same_logits_from_it(family):
    model = tiny_model(family)
    ids = torch.randint(3, 20, (2, 12), generator=torch.Generator().manual_seed(0))
    whole = model(input_ids=ids, use_cache=False).logits
    cache = growing.growing_cache()
    parts = [model(input_ids=ids[:, a:b], position_ids=torch.arange(a, b)[None].expand(2, -1), cache=cache, use_cache=True).logits
             for a, b in ((0, 6), (6, 7), (7, 12))]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
