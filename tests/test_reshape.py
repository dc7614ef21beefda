"""Reshaping: closed form, mass, ties, the gate's switches, purity."""
import math

import pytest
import torch

from oar.reshape import GATES, normalise_scores, reshape, row_weights


def test_closed_form():
    # log1p(e^k - 1) = k, so the normalised scores are 0, 1/4, 1/2, 3/4, 1 and tau (quantile 0.25) is 1/4
    s = torch.tensor([math.expm1(k) for k in range(5)])
    assert normalise_scores(s).tolist() == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    w = row_weights(s, threshold=0.25, boost=1.0, floor=0.1, renormalise=False)
    assert w.tolist() == pytest.approx([0.1, 1, 1 + 1 / 3, 1 + 2 / 3, 2])
    assert row_weights(s).tolist() == pytest.approx([x * 5 / 6.1 for x in w.tolist()], rel=1e-5)


def test_switches():
    s = torch.tensor([math.expm1(k) for k in range(5)])
    boost = row_weights(s, threshold=0.5, gate="boost_only", renormalise=False)
    suppress = row_weights(s, threshold=0.5, gate="suppress_only", renormalise=False)
    assert boost.tolist() == pytest.approx([1, 1, 1, 1.5, 2]) and suppress.tolist() == pytest.approx([0.1, 0.5, 1, 1, 1])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.25, 0.9, 1.0])
def test_mass_is_kept_and_weights_are_sound(gate, threshold):
    torch.manual_seed(0)
    for n in (1, 2, 3, 50, 400):
        for s in (torch.rand(n), torch.randn(n).exp() ** 4, torch.zeros(n), (torch.rand(n) > 0.9).float(), torch.rand(n) * 1e-20):
            w = row_weights(s, threshold=threshold, gate=gate)
            assert w.sum().item() == pytest.approx(n, rel=1e-5) and (w >= 0).all() and w.isfinite().all()


def test_constant_single_and_empty_scores_give_ones():
    for s in (torch.full((7,), 3.0), torch.tensor([5.0]), torch.zeros(0)):
        assert torch.equal(row_weights(s), torch.ones(len(s)))


def test_ties_at_the_minimum_only_boost():
    # more than a quarter of the scores sit at the minimum: tau is the minimum and nothing lies below it
    w = row_weights(torch.tensor([0.0, 0, 0, 1]), renormalise=False)
    assert w.tolist() == [1, 1, 1, 2]


def test_rows_are_independent_and_order_does_not_matter():
    torch.manual_seed(0)
    s, mask = torch.rand(6, 20) * 5, torch.rand(6, 20) > 0.3
    mask[3] = False
    together = reshape(s, mask, threshold=0.7)
    assert (together[~mask] == 1).all() and (together[mask] != 1).any()
    order = [4, 2, 0, 5, 1, 3]
    assert torch.equal(reshape(s[order], mask[order], threshold=0.7), together[order])
    for row in range(6):
        assert torch.equal(reshape(s[row:row + 1], mask[row:row + 1], threshold=0.7)[0], together[row])


def test_scores_outside_the_mask_do_not_matter():
    s, mask = torch.tensor([[1.0, 2, 3, 1e9]]), torch.tensor([[True, True, True, False]])
    assert torch.equal(reshape(s, mask)[0, :3], reshape(s[:, :3], mask[:, :3])[0])


def test_monotone_in_the_score():
    torch.manual_seed(0)
    s = torch.rand(40).sort().values
    assert (row_weights(s).diff() >= 0).all()
