"""Batched OAR-P is serial OAR-P: with prefix sharing, any budget, any batch composition, padding and lost memory."""
import pytest
import torch
from conftest import EOS_ID, PAD_ID, make_batch, tiny_model

from oar import halving, perturb
from oar.probe import PROBES, build_probe, segment

TOLERANCE = 1e-5


def probe_of(batch, tokenizer, kind="answer_mean"):
    segments = [segment(tokenizer, batch.row_ids(row), (EOS_ID,)) for row in range(len(batch))]
    return build_probe(batch, segments, kind, tokenizer.encode("####"), PAD_ID)


def scores(model, batch, tokenizer, kind="answer_mean", budget=10 ** 6):
    probe = probe_of(batch, tokenizer, kind)
    return perturb.oar_p(model, probe, perturb.mask_edits(probe, PAD_ID), budget)


@pytest.mark.parametrize("kind", PROBES)
def test_batched_equals_serial(model, lab_batch, tokenizer, kind):
    probe = probe_of(lab_batch, tokenizer, kind)
    edits = perturb.mask_edits(probe, PAD_ID)
    serial = perturb.oar_p_serial(model, probe, edits)
    assert serial[probe.reasoning_mask].max() > 1e-3 and (serial[~probe.reasoning_mask] == 0).all()
    for budget in (1, 70, 300, 10 ** 6):
        assert (perturb.oar_p(model, probe, edits, budget) - serial).abs().max() < TOLERANCE


def test_resampled_edits_too(model, lab_batch, tokenizer):
    probe = probe_of(lab_batch, tokenizer)
    edits = perturb.resample_edits(model, probe, 1.0, torch.Generator().manual_seed(0), 10 ** 6)
    own = probe.ids[:, probe.prompt_width:]
    assert (edits != own)[probe.reasoning_mask].all() and (edits == own)[~probe.reasoning_mask].all()
    again = perturb.resample_edits(model, probe, 1.0, torch.Generator().manual_seed(0), 1)
    assert torch.equal(edits, again)                                                 # whatever the budget
    assert (perturb.oar_p(model, probe, edits, 200) - perturb.oar_p_serial(model, probe, edits)).abs().max() < TOLERANCE


def test_resample_follows_the_policy_without_the_token_itself(tokenizer):
    model = tiny_model("llama")
    batch = make_batch([[12, 5]] * 3000, [tokenizer.encode("so #### 7 5")] * 3000, tokenizer)
    probe = probe_of(batch, tokenizer)
    edits = perturb.resample_edits(model, probe, 1.0, torch.Generator().manual_seed(1), 10 ** 6)[:, 0]
    p = model(torch.tensor([[12, 5]])).logits[0, -1].softmax(-1)
    p[batch.completion_ids[0, 0]] = 0
    shares = torch.bincount(edits, minlength=len(p)) / 3000
    assert (shares - p / p.sum()).abs().max() < 0.03


def test_batch_composition_does_not_matter(model, lab_batch, tokenizer):
    together = scores(model, lab_batch, tokenizer)
    for order in ([2, 0, 3, 1], [1], [3, 2]):
        part = scores(model, lab_batch.rows(order), tokenizer)
        for i, row in enumerate(order):
            width = min(part.shape[1], together.shape[1])
            assert (part[i, :width] - together[row, :width]).abs().max() < TOLERANCE


def test_left_padding_does_not_matter(model, lab_batch, tokenizer):
    prompts = [p[m].tolist() for p, m in zip(lab_batch.prompt_ids, lab_batch.prompt_mask)]
    wide = make_batch([*prompts, [7] * 60], [*map(lab_batch.row_ids, range(4)), [8]], tokenizer)
    difference = scores(model, wide, tokenizer)[:4] - scores(model, lab_batch, tokenizer)
    assert difference.abs().max() < TOLERANCE


def test_lost_memory_halves_the_work_and_changes_nothing(model, lab_batch, tokenizer, monkeypatch):
    expected, sizes = scores(model, lab_batch, tokenizer), []
    forward = model.forward

    def small_device(*args, input_ids=None, **kwargs):
        sizes.append(len(input_ids))
        if len(input_ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return forward(*args, input_ids=input_ids, **kwargs)

    small_device.__signature__ = __import__("inspect").signature(forward)
    monkeypatch.setattr(model, "forward", small_device)
    with halving.phase("attribution"):
        assert (scores(model, lab_batch, tokenizer) - expected).abs().max() < TOLERANCE
    assert max(sizes) > 3 and sizes.count(max(sizes)) < 4                            # it does not try the lost size again and again


def test_memory_that_does_not_hold_one_row_is_an_error(lab_batch, tokenizer, monkeypatch):
    model = tiny_model("llama")

    def no_memory(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    monkeypatch.setattr(model, "forward", no_memory)
    with pytest.raises(RuntimeError, match="not enough memory"):
        scores(model, lab_batch, tokenizer)


def test_logits_are_computed_at_probe_positions_only(model, lab_batch, tokenizer):
    rows = []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: rows.append(output.shape[1]))
    scores(model, lab_batch, tokenizer)
    assert max(rows) == 2                                                            # K answer tokens, never L


def test_joint_scores_are_clamped_at_zero(model, lab_batch, tokenizer):
    importance = scores(model, lab_batch, tokenizer, "answer_joint")
    assert (importance >= 0).all() and (importance > 0).any() and (importance == 0).sum() > (~probe_of(lab_batch, tokenizer).reasoning_mask).sum()


@pytest.mark.parametrize("texts", [["#### 7 5 <eos>"], ["<eos>"], ["so"], ["so <eos>", "#### 1 2"]])
def test_empty_and_single_token_reasoning(model, tokenizer, texts):
    batch = make_batch([[12, 5]] * len(texts), [tokenizer.encode(t) for t in texts], tokenizer)
    probe = probe_of(batch, tokenizer)
    edits = perturb.mask_edits(probe, PAD_ID)
    fast, serial = perturb.oar_p(model, probe, edits, 100), perturb.oar_p_serial(model, probe, edits)
    assert fast.isfinite().all() and (fast - serial).abs().max() < TOLERANCE
