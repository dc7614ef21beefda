"""The sampler: same distribution as the loss, and a row that depends on its prompt and its random numbers only."""
import pytest
import torch
from conftest import EOS_ID, PAD_ID, tiny_model

from oar import grpo
from oar.models import Policy
from oar.rollout import cut_at_stop, draw_uniforms, pick_tokens, sample

PROMPTS = [[12, 5, 13, 7, 19], [12, 9, 13], [12, 2, 13, 3, 19, 12, 14, 4, 20]]


def uniforms(rows, length, seed=0):
    return draw_uniforms(rows, length, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_and_loss_describe_the_same_distribution(policy, temperature):
    batch = sample(policy, PROMPTS, 4, 12, uniforms(12, 12), temperature)
    forward = grpo.completion_logprobs(policy.model, batch, temperature)
    assert torch.allclose(forward, batch.logprobs, atol=1e-4)
    assert (batch.entropy[batch.completion_mask] > 0).all()


def test_rows_do_not_depend_on_the_batch(policy):
    numbers = uniforms(12, 12)
    together = sample(policy, PROMPTS, 4, 12, numbers)
    for i, prompt in enumerate(PROMPTS):
        alone = sample(policy, [prompt], 4, 12, numbers[4 * i:4 * i + 4])
        assert [alone.row_ids(r) for r in range(4)] == [together.row_ids(4 * i + r) for r in range(4)]


def test_greedy_equals_generate(policy):
    batch = sample(policy, PROMPTS, 1, 10, uniforms(3, 10), temperature=0)
    for row, prompt in enumerate(PROMPTS):
        theirs = policy.model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, pad_token_id=PAD_ID)
        assert batch.row_ids(row) == theirs[0, len(prompt):].tolist()


def test_mode_is_restored(policy):
    policy.model.train()
    sample(policy, PROMPTS, 1, 2, uniforms(3, 2))
    assert policy.model.training


class Script(torch.nn.Module):
    """A "model" that writes given token ids, row by row, whatever it reads (one row at a time)."""
    def __init__(self, ids):
        super().__init__()
        self.ids, self.step, self.device = ids, 0, torch.device("cpu")

    def forward(self, input_ids, cache, **_):
        logits = torch.full((len(input_ids), 1, 36), -torch.inf)
        logits[:, -1, self.ids[min(self.step, len(self.ids) - 1)]] = 0.0
        self.step += 1
        cache.update(torch.zeros(len(input_ids), 1, input_ids.shape[1], 1), torch.zeros(len(input_ids), 1, input_ids.shape[1], 1), 0)
        return type("Output", (), {"logits": logits})


def scripted(ids, tokenizer, length=8, eos_ids=(EOS_ID,), **options):
    return sample(Policy(Script(ids), tokenizer, eos_ids, True), [[5, 6]], 2, length, uniforms(2, length), **options)


def test_mask_holds_the_first_eos_and_nothing_after(tokenizer):
    batch = scripted([5, 6, EOS_ID], tokenizer)
    assert batch.completion_mask.tolist() == [[True] * 3] * 2 and batch.finished.all()
    assert batch.row_ids(0) == [5, 6, EOS_ID] and batch.texts[0] == "3 4"


def test_pad_equal_to_eos_keeps_the_eos(tokenizer):
    batch = scripted([5, 6, PAD_ID], tokenizer, eos_ids=(PAD_ID,))
    assert batch.row_ids(0) == [5, 6, PAD_ID] and batch.finished.all()


def test_any_of_several_eos_ids_ends(tokenizer):
    assert scripted([5, 7], tokenizer, eos_ids=(EOS_ID, 7)).row_ids(1) == [5, 7]


def test_a_model_that_never_stops_is_truncated(tokenizer):
    batch = scripted([5], tokenizer, length=4)
    assert batch.completion_mask.all() and batch.completion_mask.shape == (2, 4) and not batch.finished.any()


def test_only_eos(tokenizer):
    batch = scripted([EOS_ID], tokenizer)
    assert batch.texts == ["", ""] and batch.completion_mask.sum() == 2


def test_stop_string_cuts_text_and_mask(tokenizer):
    batch = scripted([5, 6, 7, 8, 9], tokenizer, stop_strings=["5 6", "4 5"])      # "4 5" comes first in the text
    assert batch.texts[0] == "3" and batch.row_ids(0) == [5] and batch.finished.all()
    assert cut_at_stop(tokenizer, [5, 6, 7], ["9"]) is None


def test_picked_tokens_follow_the_distribution():
    logits = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2]))
    picked, logprobs, entropy = pick_tokens(logits.expand(20000, -1), torch.rand(20000, generator=torch.Generator().manual_seed(0)), 1.0, 1.0)
    shares = torch.bincount(picked, minlength=4) / 20000
    assert shares.tolist() == pytest.approx([0.5, 0, 0.3, 0.2], abs=0.015)
    assert logprobs[picked == 2][0].item() == pytest.approx(-1.2040, abs=1e-3)
    assert entropy[0].item() == pytest.approx(1.0297, abs=1e-3)                     # nats; a -inf logit adds 0, not NaN


def test_extreme_uniforms_pick_possible_tokens():
    logits = torch.log(torch.tensor([[0.0, 0.7, 0.3, 0.0]])).expand(2, -1)
    picked, _, _ = pick_tokens(logits, torch.tensor([0.0, 1 - 2 ** -24]), 1.0, 1.0)
    assert picked.tolist() == [1, 2]


def test_top_p_keeps_the_smallest_sufficient_set():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(5000, -1)
    picked, _, _ = pick_tokens(logits, torch.rand(5000, generator=torch.Generator().manual_seed(0)), 1.0, 0.7)
    assert set(picked.tolist()) == {0, 1}


def test_one_batched_call_gives_distinct_samples(tokenizer):
    policy = Policy(tiny_model("llama"), tokenizer, (EOS_ID,), True)
    batch = sample(policy, [PROMPTS[0], PROMPTS[0]], 4, 12, uniforms(8, 12))
    assert len(set(batch.texts)) > 4                                                 # equal prompts, independent groups
