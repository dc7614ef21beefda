"""Each logged number by hand."""
import math

import pytest
import torch

from oar import metrics


def test_ess_ratio():
    weights = torch.tensor([[1.0, 1, 1, 9], [3.0, 1, 0, 0]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    assert metrics.ess_ratio(weights, mask) == pytest.approx((1 + 16 / 20) / 2)
    assert math.isnan(metrics.ess_ratio(weights, torch.zeros_like(mask)))


def test_top_mass():
    advantages = torch.zeros(2, 20)
    advantages[0] = -1.0
    advantages[0, :2] = -11.0                                  # the top 10% of 20 tokens: 22 of 40
    assert metrics.top_mass(advantages, torch.ones(2, 20, dtype=torch.bool)) == pytest.approx(22 / 40)


def test_informative_share():
    assert metrics.informative_share(torch.tensor([0.0, 0, 1, -1, 0, 0, 0, 0]), 2) == 0.25


def test_masked_mean():
    assert metrics.masked_mean(torch.tensor([1.0, 2, 50]), torch.tensor([True, True, False])) == 1.5
    assert math.isnan(metrics.masked_mean(torch.ones(2), torch.zeros(2, dtype=torch.bool)))


def test_pass_at_k():
    assert metrics.pass_at_k(4, 1, 1) == 0.25 and metrics.pass_at_k(4, 1, 4) == 1 and metrics.pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert metrics.pass_at_k(2, 0, 2) == 0
    for n, k in ((2, 5), (1, 10), (4, 0)):
        with pytest.raises(ValueError, match="needs at least"):
            metrics.pass_at_k(n, 0, k)


def test_peak_memory_is_positive():
    assert metrics.peak_memory_mb(torch.device("cpu")) > 10
