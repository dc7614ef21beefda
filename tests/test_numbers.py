"""Numbers that are not finite: the step is skipped, counted and named; a sample without a reward leaves its group."""
import json
import math
import sys

import pytest
import torch
from conftest import tiny_model

import train
from oar import baselines, checkpoint, credit, gradnoise, grpo, models, record
from oar.errors import UserError

NAN, INF = math.nan, math.inf
SMALL = ["--steps", "4", "--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "72", "--validation-size", "0", "--save-every", "1",
         "--device", "cpu", "--quiet"]


def run(folder, *argv):
    sys.argv = ["train.py", *SMALL, "--out", str(folder), *argv]
    train.main()
    return checkpoint.read_records(folder / "metrics.jsonl")


def weights(folder):
    return models.load(str(folder), torch.device("cpu")).model.state_dict()


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


# --------------------------------------------------------------------------------------------------------------------
# rewards that cannot be had

def test_a_missing_reward_leaves_its_group():
    rewards = torch.tensor([1, 0, NAN, 1, NAN, NAN, NAN, 1, 1, NAN, 1, 1, 0, 1, 0, 0, NAN, NAN, INF, -INF])
    groups = grpo.group_advantages(rewards, 4).view(-1, 4)
    three = grpo.group_advantages(torch.tensor([1.0, 0, 1]), 3)                      # (1 - 2/3) / (0.5774 + eps), ...
    assert three[0].item() == pytest.approx((1 / 3) / (math.sqrt(1 / 3) + 1e-4))
    assert torch.equal(groups[0], torch.stack([three[0], three[1], torch.tensor(0.0), three[2]]))
    assert groups[1].tolist() == groups[2].tolist() == groups[4].tolist() == [0.0] * 4      # one left; equal ones left; none left
    assert torch.equal(groups[3], grpo.group_advantages(torch.tensor([0.0, 1, 0, 0]), 4))


def test_coefficients_are_those_of_the_kept_completions():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
    kept = torch.tensor([True, False, True])
    for norm in grpo.LOSS_NORMS:
        some = grpo.loss_coefficients(mask, norm, 5, kept)
        assert torch.equal(some[kept], grpo.loss_coefficients(mask[kept], norm, 5)) and (some[1] == 0).all()
        assert grpo.loss_coefficients(mask, norm, 5, torch.zeros(3).bool()).abs().sum() == 0
        assert torch.equal(grpo.loss_coefficients(mask, norm, 5, torch.ones(3).bool()), grpo.loss_coefficients(mask, norm, 5))


@pytest.mark.parametrize("norm", grpo.LOSS_NORMS)
def test_a_step_without_the_sample_is_the_step_of_the_others(lab_batch, norm):
    """Weights after an update of four with one reward missing = after an update of the other three; with the KL as well."""
    def updated(batch, rewards, group_size):
        model, reference = tiny_model("llama"), tiny_model("llama", seed=1)
        advantages = grpo.group_advantages(rewards, group_size)
        coefficients = grpo.loss_coefficients(batch.completion_mask, norm, 80, rewards.isfinite())
        grpo.update(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, advantages[:, None] * batch.completion_mask, coefficients,
                    temperature=1.0, inner_epochs=1, token_budget=10 ** 6, clip_low=0.2, clip_high=0.2, max_grad_norm=1e9,
                    ref_model=reference, kl_beta=0.1)
        return model

    four = updated(lab_batch, torch.tensor([1.0, NAN, 0, 1]), 4)
    three = updated(lab_batch.rows([0, 2, 3]), torch.tensor([1.0, 0, 1]), 3)
    assert max((a - b).abs().max() for a, b in zip(four.parameters(), three.parameters())) < 1e-6
    assert max((a - b).abs().max() for a, b in zip(four.parameters(), tiny_model("llama").parameters())) > 1e-3


def test_ktae_counts_without_the_sample(lab_batch):
    rewards, three = torch.tensor([1.0, NAN, 0, 1]), torch.tensor([1.0, 0, 1])
    with_gap = baselines.ktae(lab_batch, grpo.group_advantages(rewards, 4), rewards, 4, (1,))
    without = baselines.ktae(lab_batch.rows([0, 2, 3]), grpo.group_advantages(three, 3), three, 3, (1,))
    assert torch.allclose(with_gap[[0, 2, 3]][:, :without.shape[1]], without) and (with_gap[1] == 0).all()
    assert (baselines.ktae(lab_batch, torch.zeros(4), torch.full((4,), NAN), 4, (1,)) == 0).all()


@pytest.mark.parametrize("missing", [None, NAN])
def test_training_with_missing_rewards(tmp_path, monkeypatch, missing):
    calls, real = [0], train.is_correct

    def sometimes(text, gold):
        calls[0] += 1
        return missing if calls[0] % 3 == 0 or calls[0] > 24 else real(text, gold)       # the last step has no reward at all

    monkeypatch.setattr(train, "is_correct", sometimes)
    records = run(tmp_path / "run")
    assert [r["dropped"] for r in records] == [2, 3, 3, 8] and records[3]["reward"] is None and records[3]["grad_norm"] == 0
    assert all(0 <= r["reward"] <= 1 and r["skipped"] is None for r in records[:3]) and any(r["grad_norm"] > 0 for r in records)
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text() + (tmp_path / "run" / "samples.jsonl").read_text()


# --------------------------------------------------------------------------------------------------------------------
# loss, gradient, importance

def update(model, optimizer, batch, token_advantages, **options):
    coefficients = grpo.loss_coefficients(batch.completion_mask, "sequence", 80)
    return grpo.update(model, optimizer, batch, token_advantages, coefficients, **{**dict(
        temperature=1.0, inner_epochs=1, token_budget=10 ** 6, clip_low=0.2, clip_high=0.2, max_grad_norm=1.0), **options})


@pytest.mark.parametrize("fault", ["loss", "gradient"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_faulty_pass_changes_nothing(lab_batch, fault, value):
    model = tiny_model("llama")
    optimizer, advantages = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.ones(lab_batch.completion_mask.shape)
    assert update(model, optimizer, lab_batch, advantages)["skipped"] is None
    before, state = {n: p.clone() for n, p in model.state_dict().items()}, json.dumps(str(optimizer.state_dict()))
    if fault == "loss":
        advantages[1, 0] = value
    else:
        model.get_output_embeddings().weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), value))
    learned = update(model, optimizer, lab_batch, advantages, inner_epochs=2)
    assert learned["skipped"] == fault and equal(before, model.state_dict()) and json.dumps(str(optimizer.state_dict())) == state
    assert all(p.grad is None for p in model.parameters())
    json.dumps(record.finite(learned), allow_nan=False)


def test_a_faulty_later_epoch_keeps_the_earlier_ones(lab_batch):
    model, passes = tiny_model("llama"), [0]

    def second_is_faulty(gradient):
        passes[0] += 1
        return gradient * (NAN if passes[0] == 2 else 1)

    model.get_output_embeddings().weight.register_hook(second_is_faulty)
    once = tiny_model("llama")
    advantages = torch.ones(lab_batch.completion_mask.shape)
    assert update(model, torch.optim.SGD(model.parameters(), lr=0.1), lab_batch, advantages, inner_epochs=3)["skipped"] == "gradient"
    update(once, torch.optim.SGD(once.parameters(), lr=0.1), lab_batch, advantages)
    assert passes[0] == 2 and equal(once.state_dict(), model.state_dict())


@pytest.mark.parametrize("value", [NAN, INF])
def test_faulty_importance_gives_plain_weights_and_says_so(policy, lab_batch, monkeypatch, value):
    monkeypatch.setattr(gradnoise, "oar_g", lambda model, probe, *_: torch.full(probe.reasoning_mask.shape, value))
    rewards = torch.tensor([1.0, 0, 0, 1])
    given = credit.assign_credit(policy, lab_batch, rewards, grpo.group_advantages(rewards, 4), credit.CreditConfig(), 4, 1.0,
                                 torch.Generator(), 10 ** 6)
    assert not given.finite and (given.weights == 1).all() and given.token_advantages.isfinite().all()


def faulty_at(steps, monkeypatch):
    """Importance of the given steps is NaN."""
    real = train.assign_credit

    def assign(*args):
        given = real(*args)
        if state["step"] in steps:
            given.finite = False
        return given

    state, step_of = {"step": 0}, train.train_step
    monkeypatch.setattr(train, "assign_credit", assign)
    monkeypatch.setattr(train, "train_step", lambda *args: (state.update(step=args[5]), step_of(*args))[1])


def test_a_skipped_step_is_logged_and_moves_no_weight(tmp_path, monkeypatch, capsys):
    faulty_at({2, 4}, monkeypatch)
    records = run(tmp_path / "run")
    assert [r["skipped"] for r in records] == [None, "importance", None, "importance"] and [r["step"] for r in records] == [1, 2, 3, 4]
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert equal(weights(checkpoints[0]), weights(checkpoints[1]))                   # steps 3 and 4
    assert "step 2: its importance is not finite" in capsys.readouterr().out


def test_many_in_a_row_stop_the_run_with_its_state(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        faulty_at({2, 3}, patch)
        with pytest.raises(UserError, match="the importance was not finite in 2 steps in a row"):
            run(tmp_path / "run", "--max-skipped", "2")
    assert checkpoint.latest_checkpoint(tmp_path / "run").name == "step_000003"
    sys.argv = ["train.py", "--resume", str(tmp_path / "run"), "--quiet"]
    train.main()
    assert [r["skipped"] for r in checkpoint.read_records(tmp_path / "run" / "metrics.jsonl")] == [None, "importance", "importance", None]


def test_a_policy_of_nan_is_skipped_not_crashed(tmp_path, monkeypatch):
    real = models.load

    def broken(*args, **kwargs):
        policy = real(*args, **kwargs)
        policy.model.get_input_embeddings().weight.data.fill_(NAN)
        return policy

    monkeypatch.setattr(models, "load", broken)
    with pytest.raises(UserError, match="the sampling distribution was not finite in 1 steps"):
        run(tmp_path / "run", "--max-skipped", "1")


def test_skips_in_a_row_are_counted_from_the_record(tmp_path):
    file = tmp_path / "metrics.jsonl"
    checkpoint.append_jsonl(file, {"step": 0}, {"step": 1, "skipped": "loss"}, {"step": 2, "skipped": None})
    assert record.skipped_in_a_row(file) == 0
    checkpoint.append_jsonl(file, {"step": 3, "skipped": "loss"}, {"step": 4, "skipped": "gradient"})
    assert record.skipped_in_a_row(file) == 2
