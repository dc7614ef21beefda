"""assign_credit: every method, advantage mass, exact skipping, and the limits of a group."""
import dataclasses

import pytest
import torch
from conftest import EOS_ID, ROOT, tiny_model

from oar import grpo, lab
from oar.credit import METHODS, CreditConfig, assign_credit
from oar.models import Policy
from oar.verify import extract_answer


def credit(policy, batch, advantages, method, budget=10 ** 6, **settings):
    roles = [[lab.TokenRole("result", 0, i % 3 == 0) for i in range(len(batch.row_ids(row)))] for row in range(len(batch))]
    return assign_credit(policy, batch, (advantages > 0).float(), advantages, CreditConfig(method=method, **settings), len(batch), 1.0,
                         torch.Generator().manual_seed(0), budget, roles)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_sound_credit(policy, lab_batch, method):
    advantages = torch.tensor([1.0, -0.5, 0.0, -0.5])
    result = credit(policy, lab_batch, advantages, method)
    mask = lab_batch.completion_mask
    assert result.token_advantages.isfinite().all() and (result.token_advantages[~mask] == 0).all()
    if method != "ktae":                                                             # KTAE shapes an informative group as a whole
        assert (result.token_advantages[2] == 0).all()                               # advantage 0 stays 0
    if method not in ("entropy_bonus", "ktae"):
        mass, uniform = result.token_advantages.sum(1), advantages * mask.sum(1)
        assert torch.allclose(mass, uniform, rtol=1e-5)
        assert (result.weights[mask & ~result.reasoning_mask] == 1).all()            # conclusion, answer and tail
        assert (result.weights[result.reasoning_mask & (advantages != 0)[:, None]] != 1).any() == (method != "grpo")


@pytest.mark.parametrize("method", ["oar_p", "oar_g", "entropy", "roles", "inverted"])
def test_uninformative_completions_are_skipped_exactly(policy, lab_batch, method):
    everyone = credit(policy, lab_batch, torch.tensor([1.0, -0.5, 0.7, -0.5]), method)
    some = credit(policy, lab_batch, torch.tensor([1.0, -0.5, 0.0, 0.0]), method)
    assert torch.allclose(some.token_advantages[0], everyone.token_advantages[0], rtol=1e-4, atol=1e-5)
    assert (some.importance[2:] == 0).all() and (some.weights[2:] == 1).all()


@pytest.mark.parametrize("method", METHODS)
def test_nothing_to_attribute(policy, lab_batch, method):
    result = credit(policy, lab_batch, torch.zeros(4), method)
    assert (result.token_advantages == 0).all() and (result.weights == 1).all()


def test_weights_of_one_are_grpo(policy, lab_batch):
    """Constant importance gives weights of 1, and the token advantages are GRPO's to the bit."""
    advantages = torch.tensor([1.0, -0.5, 0.3, -0.5])
    plain = credit(policy, lab_batch, advantages, "grpo").token_advantages
    lab_batch.entropy = lab_batch.completion_mask.float()
    assert torch.equal(credit(policy, lab_batch, advantages, "entropy").token_advantages, plain)
    assert torch.equal(plain, advantages[:, None] * lab_batch.completion_mask)


def test_no_renormalising_loses_mass(policy, lab_batch):
    advantages = torch.tensor([1.0, -0.5, 0.3, -0.5])
    result = credit(policy, lab_batch, advantages, "oar_p", gate="suppress_only", renormalise=False)
    assert result.token_advantages[0].sum() < lab_batch.completion_mask[0].sum()


@pytest.mark.parametrize("probe", ["last", "answer_mean", "answer_joint"])
@pytest.mark.parametrize("method", ["oar_p", "oar_g", "oar_f"])
def test_probes_reach_the_scores(lab_batch, tokenizer, method, probe):
    policy = Policy(tiny_model("llama"), tokenizer, (EOS_ID,), True)
    importance = credit(policy, lab_batch, torch.ones(4), method, probe=probe).importance
    assert (importance[1] > 0).any()
    if probe != "answer_mean":
        assert not torch.allclose(importance, credit(policy, lab_batch, torch.ones(4), method).importance)


def test_resample_is_an_option_of_oar_p(policy, lab_batch):
    one, two = (credit(policy, lab_batch, torch.ones(4), "oar_p", perturb=p).importance for p in ("mask", "resample"))
    assert not torch.allclose(one, two)


def test_permuting_the_batch_permutes_the_credit(policy, lab_batch):
    advantages, order = torch.tensor([1.0, -0.5, 0.3, -0.8]), [3, 1, 0, 2]
    together = credit(policy, lab_batch, advantages, "oar_p").token_advantages
    permuted = credit(policy, lab_batch.rows(order), advantages[order], "oar_p").token_advantages
    assert torch.allclose(permuted, together[order], atol=1e-4)


def test_a_completion_without_answer_is_scored_to_its_end(policy, lab_batch):
    assert extract_answer(lab_batch.texts[2]) is None
    result = credit(policy, lab_batch, torch.ones(4), "oar_p")
    assert torch.equal(result.reasoning_mask[2], lab_batch.completion_mask[2]) and (result.importance[2] > 0).any()


def test_every_setting_is_read():
    source = (ROOT / "oar/credit.py").read_text()
    for setting in dataclasses.fields(CreditConfig):
        assert f"config.{setting.name}" in source, f"CreditConfig.{setting.name} is read nowhere"


def test_group_advantages_feed_credit(policy, lab_batch):
    advantages = grpo.group_advantages(torch.tensor([1.0, 0, 0, 1]), 4)
    result = credit(policy, lab_batch, advantages, "grpo")
    assert result.token_advantages[:, 0].sum().abs() < 1e-6
