"""Gradient variance, signal and cosines: by hand on small vectors, and against an ordinary backward pass."""
import pytest
import torch
from conftest import EOS_ID

from oar import gradvar, grpo

G = torch.tensor([[3.0, 0.0], [1.0, 2.0], [2.0, -2.0]])       # mean (2, 0)


def test_variance_and_signal_by_hand():
    products = gradvar.inner_products(G)
    assert products.tolist() == [[9, 3, 6], [3, 5, -2], [6, -2, 8]]
    assert gradvar.variance(products) == pytest.approx((1 + (1 + 4) + 4) / 2)        # squared distances from (2, 0), over S - 1
    assert gradvar.signal(products) == pytest.approx((3 + 6 - 2) / 3)                # mean product of two different steps
    assert gradvar.signal(products) == pytest.approx(4 - gradvar.variance(products) / 3)         # |mean|^2 - variance / S


def test_variance_scales_with_the_square_of_the_weight():
    """A.1.4: a nuisance part weighted by w has w^2 times the variance, and none at w = 0."""
    full = gradvar.variance(gradvar.inner_products(G))
    for w in (0.5, 0.1, 0.0):
        assert gradvar.variance(gradvar.inner_products(w * G)) == pytest.approx(w * w * full)


def test_cosines_leave_the_step_itself_out():
    own = gradvar.inner_products(G)
    by_hand = [torch.cosine_similarity(G[s], G[[r for r in range(3) if r != s]].mean(0), dim=0).item() for s in range(3)]
    assert gradvar.cosines(own, own, own).tolist() == pytest.approx(by_hand, rel=1e-5)
    other = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    cross = gradvar.inner_products(G, other)
    assert gradvar.cosines(own, cross, gradvar.inner_products(other)).tolist() == pytest.approx([0, 2 / 5 ** 0.5, -1 / 2 ** 0.5])
    assert gradvar.cosines(0 * own, 0 * own, own).tolist() == [0, 0, 0]


def test_signal_is_unbiased():
    draws = torch.randn(4000, 8, 3, generator=torch.Generator().manual_seed(0)) + torch.tensor([0.5, 0.0, 0.0])
    signals = [gradvar.signal(gradvar.inner_products(d)) for d in draws]
    assert sum(signals) / len(signals) == pytest.approx(0.25, abs=0.02) and min(signals) < 0


def test_step_gradient_is_the_backward_pass(model, lab_batch):
    advantages = torch.tensor([1.0, -0.5, 0.0, 2.0])[:, None] * lab_batch.completion_mask
    coefficients = grpo.loss_coefficients(lab_batch.completion_mask, "sequence", 40)
    flat = gradvar.step_gradient(model, lab_batch, advantages, coefficients)
    assert all(p.grad is None for p in model.parameters())
    logprobs = grpo.completion_logprobs(model, lab_batch)
    (-(logprobs * advantages * coefficients).sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(flat, expected, atol=1e-5 * expected.abs().max().item())
    small = gradvar.step_gradient(model, lab_batch, advantages, coefficients, token_budget=30)
    assert torch.allclose(flat, small, atol=1e-5 * expected.abs().max().item())


def test_step_gradient_is_linear_in_the_advantages(model, lab_batch):
    mask = lab_batch.completion_mask
    coefficients = grpo.loss_coefficients(mask, "sequence", 40)
    end = (lab_batch.completion_ids == EOS_ID) & mask
    whole, part, rest = (gradvar.step_gradient(model, lab_batch, m.float(), coefficients) for m in (mask, end, mask & ~end))
    assert torch.allclose(whole, part + rest, atol=1e-5 * whole.abs().max().item())
    assert not gradvar.step_gradient(model, lab_batch, torch.zeros(mask.shape), coefficients).any()
