"""The maths of grpo.py against closed forms, and the invariances that a memory knob must keep."""
import copy
import math

import pytest
import torch
from conftest import PAD_ID, make_batch, tiny_model

from oar import grpo
from oar.models import disable_dropout

SETTINGS = dict(temperature=1.0, inner_epochs=1, token_budget=10 ** 6, clip_low=0.2, clip_high=0.2, max_grad_norm=1e9)


def sgd_update(model, batch, token_advantages, norm="sequence", lr=1.0, **changes):
    """(new model, statistics) after one plain SGD step: the weight difference is the gradient."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    coefficients = grpo.loss_coefficients(batch.completion_mask, norm, 16)
    return model, grpo.update(model, optimizer, batch, token_advantages, coefficients, **{**SETTINGS, **changes})


def distance(a, b) -> float:
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters()))


def test_advantages_closed_form():
    # group 1: mean 1/4, sample std 1/2 -> 0.75 / 0.5001 and -0.25 / 0.5001; group 2 is all equal
    advantages = grpo.group_advantages(torch.tensor([1.0, 0, 0, 0, 0.3, 0.3, 0.3, 0.3]), 4)
    assert advantages[:4].tolist() == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3)
    assert advantages[4:].tolist() == [0.0] * 4          # exactly, although 0.3 has no exact mean


@pytest.mark.parametrize("group_size", [0, 1, 3])
def test_group_size_must_be_a_divisor_of_at_least_two(group_size):
    with pytest.raises(ValueError, match="group_size"):
        grpo.group_advantages(torch.ones(4), group_size)


def test_loss_coefficients():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    assert grpo.loss_coefficients(mask, "sequence", 10).tolist() == [[0.25, 0.25, 0, 0], [0.125] * 4]
    assert grpo.loss_coefficients(mask, "token", 10)[1, 3].item() == pytest.approx(1 / 6)
    assert grpo.loss_coefficients(mask, "constant", 10)[0, 0].item() == pytest.approx(1 / 20)
    assert grpo.loss_coefficients(torch.zeros(2, 3, dtype=torch.bool), "sequence", 10).sum() == 0      # empty completions


def test_policy_loss_value_and_gradient():
    # on-policy: loss = -mean(A), which is 0 for A = +1, -1, while the gradient is -A * c (T04)
    logprobs = torch.tensor([[-1.0], [-2.0]], requires_grad=True)
    loss = grpo.policy_loss(logprobs, logprobs.detach(), torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.5], [0.5]]))
    loss.backward()
    assert loss.item() == 0 and logprobs.grad.tolist() == [[-0.5], [0.5]]


def test_policy_loss_clips_on_the_side_that_would_go_on():
    logprobs = torch.tensor([[math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)]], requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    loss = grpo.policy_loss(logprobs, torch.zeros(1, 4), advantages, torch.ones(1, 4), 0.2, 0.3)
    loss.backward()
    # min(1.5, 1.3) - 1.5 + 0.5 - max(0.5, 0.8) = 1.3 - 1.5 + 0.5 - 0.8
    assert loss.item() == pytest.approx(-(1.3 - 1.5 + 0.5 - 0.8))
    assert logprobs.grad[0].tolist() == pytest.approx([0, 1.5, -0.5, 0])


@pytest.mark.parametrize("gap", [100.0, -100.0, float("inf")])
def test_huge_log_ratios_stay_finite(gap):
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    other = torch.tensor([[-1.0 + gap, -1.0]])
    loss = grpo.policy_loss(logprobs, other, torch.ones(1, 2), torch.ones(1, 2), ref_logprobs=other, kl_beta=0.1)
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()


def test_k3_closed_form():
    logprobs, ref = torch.tensor([[math.log(0.5)]]), torch.tensor([[math.log(0.25)]])
    loss = grpo.policy_loss(logprobs, logprobs, torch.zeros(1, 1), torch.ones(1, 1), ref_logprobs=ref, kl_beta=2.0)
    assert loss.item() == pytest.approx(2.0 * (0.5 - math.log(0.5) - 1))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_selected_logprobs_equal_log_softmax(temperature):
    torch.manual_seed(0)
    logits, ids, upstream = torch.randn(50, 30, requires_grad=True), torch.randint(30, (50,)), torch.randn(50)
    plain = (logits / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    ours = grpo.selected_logprobs(logits, ids, temperature, rows=7)
    assert torch.allclose(ours, plain, atol=1e-6)
    gradients = [torch.autograd.grad(x, logits, upstream)[0] for x in (plain, ours)]
    assert torch.allclose(*gradients, atol=1e-6)


def test_selected_logprobs_keep_no_float32_copy_of_the_logits():
    logits = torch.randn(64, 1000, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grpo.selected_logprobs(logits, torch.zeros(64, dtype=torch.long), 1.0, rows=16)
    assert sum(t.numel() for t in kept if t.dtype == torch.float32) < logits.numel() / 10


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_completion_logprobs_ignore_padding_and_neighbours(model, lab_batch, tokenizer, temperature):
    together = grpo.completion_logprobs(model, lab_batch, temperature)
    for row in range(len(lab_batch)):
        prompt = lab_batch.prompt_ids[row][lab_batch.prompt_mask[row]].tolist()
        ids = lab_batch.row_ids(row)
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1] / temperature
        alone = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert torch.allclose(together[row, :len(ids)], alone, atol=2e-5)
        assert (together[row, len(ids):] == 0).all()


def test_garbage_in_padded_cells_changes_nothing(model, lab_batch):
    before = grpo.completion_logprobs(model, lab_batch)
    lab_batch.prompt_ids[~lab_batch.prompt_mask] = 17
    lab_batch.completion_ids[~lab_batch.completion_mask] = 23
    assert torch.allclose(before, grpo.completion_logprobs(model, lab_batch), atol=2e-5)


@pytest.mark.parametrize("norm", grpo.LOSS_NORMS)
def test_micro_batches_and_padding_change_neither_loss_nor_gradient(model, lab_batch, tokenizer, norm):
    torch.manual_seed(1)
    token_advantages = torch.randn(lab_batch.completion_mask.shape) * lab_batch.completion_mask
    whole, stats = sgd_update(model, lab_batch, token_advantages, norm)
    assert distance(whole, model) > 1e-3
    for budget in (1, 60):                               # one row a time, two rows a time
        parts, part_stats = sgd_update(model, lab_batch, token_advantages, norm, token_budget=budget)
        assert distance(whole, parts) < 1e-5 and part_stats["loss"] == pytest.approx(stats["loss"], abs=1e-6)
    prompts = [p[m].tolist() for p, m in zip(lab_batch.prompt_ids, lab_batch.prompt_mask)]
    wider = make_batch([*prompts, [5] * 40], [*map(lab_batch.row_ids, range(4)), [5] * 50], tokenizer).rows([0, 1, 2, 3, 4])
    wider_advantages = torch.zeros(wider.completion_mask.shape)
    wider_advantages[:4, :token_advantages.shape[1]] = token_advantages
    coefficients = torch.zeros(wider.completion_mask.shape)
    coefficients[:4, :token_advantages.shape[1]] = grpo.loss_coefficients(lab_batch.completion_mask, norm, 16)
    padded = copy.deepcopy(model)
    grpo.update(padded, torch.optim.SGD(padded.parameters(), lr=1.0), wider, wider_advantages, coefficients, **SETTINGS)
    assert distance(whole, padded) < 1e-5


def test_lost_memory_halves_the_micro_batch_and_changes_nothing(model, lab_batch, monkeypatch):
    token_advantages = torch.linspace(-1, 1, 4)[:, None] * lab_batch.completion_mask
    expected, stats = sgd_update(model, lab_batch, token_advantages)
    forward, calls = grpo.completion_logprobs, []

    def small_device(model, part, temperature):
        calls.append(len(part))
        if len(part) > 2 or len(calls) == 3:         # too large at first, and once in the middle of a pass
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return forward(model, part, temperature)

    monkeypatch.setattr(grpo, "completion_logprobs", small_device)
    halved, halved_stats = sgd_update(model, lab_batch, token_advantages, token_budget=200)
    assert calls[0] == 4 and 3 <= len(calls) <= 10 and distance(halved, expected) < 1e-5
    assert halved_stats["loss"] == pytest.approx(stats["loss"], abs=1e-6)


def test_equal_rewards_change_no_weight_even_with_momentum(model, lab_batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    coefficients = grpo.loss_coefficients(lab_batch.completion_mask, "sequence", 16)
    grpo.update(model, optimizer, lab_batch, torch.ones(lab_batch.completion_mask.shape), coefficients, **SETTINGS)
    before = copy.deepcopy(model)
    stats = grpo.update(model, optimizer, lab_batch, torch.zeros(lab_batch.completion_mask.shape), coefficients, **SETTINGS)
    assert distance(model, before) == 0 and stats["grad_norm"] == 0


def test_equal_rewards_with_kl_follow_the_kl_gradient_only(lab_batch):
    model, reference = tiny_model("llama", 0), tiny_model("llama", 1)
    zero = torch.zeros(lab_batch.completion_mask.shape)
    moved, stats = sgd_update(model, lab_batch, zero, lr=1e-3, ref_model=reference, kl_beta=0.1)
    expected = copy.deepcopy(model)
    log_r = grpo.completion_logprobs(reference, lab_batch).detach() - grpo.completion_logprobs(expected, lab_batch)
    coefficients = grpo.loss_coefficients(lab_batch.completion_mask, "sequence", 16)
    (0.1 * (coefficients * (log_r.exp() - log_r - 1)).sum()).backward()
    with torch.no_grad():
        for p in expected.parameters():
            p -= 1e-3 * p.grad
    assert distance(moved, model) > 1e-6 and distance(moved, expected) < 1e-6 and stats["kl_ref"] > 0


def test_inner_epochs_keep_the_old_logprobs_of_their_row(model, lab_batch, monkeypatch):
    seen = {}
    loss = grpo.policy_loss

    def spy(logprobs, old, token_advantages, *args):
        for row, tag in enumerate(token_advantages[:, 0].tolist()):
            seen.setdefault(round(tag, 3), []).append((old[row].sum().item(), (logprobs[row] - old[row]).abs().max().item()))
        return loss(logprobs, old, token_advantages, *args)

    monkeypatch.setattr(grpo, "policy_loss", spy)
    tags = torch.tensor([0.1, 0.2, -0.3, -0.4])[:, None].expand(lab_batch.completion_mask.shape)
    _, stats = sgd_update(model, lab_batch, tags * lab_batch.completion_mask, lr=0.1, inner_epochs=2, token_budget=60)
    assert sorted(seen) == [-0.4, -0.3, 0.1, 0.2]
    for first, second in seen.values():
        assert first[1] == 0 and second[1] > 0 and first[0] == pytest.approx(second[0], abs=1e-4)
    assert stats["approx_kl"] > 0


def test_dropout_is_off_in_train_mode(lab_batch):
    model = tiny_model("gpt2", dropout=0.3)
    model.train()
    noisy = [grpo.completion_logprobs(model, lab_batch) for _ in range(2)]
    assert not torch.equal(*noisy)
    disable_dropout(model)
    assert torch.equal(*[grpo.completion_logprobs(model, lab_batch) for _ in range(2)])


def test_pad_id_is_never_taken_for_padding(model, lab_batch, tokenizer):
    # pad = eos, and a pad token in the middle of a completion: masks come from lengths (T07)
    batch = make_batch([[5, 6]], [[7, PAD_ID, 8, PAD_ID]], tokenizer)
    logprobs = grpo.completion_logprobs(model, batch)
    assert batch.completion_mask.tolist() == [[True] * 4] and (logprobs < 0).all()
