"""Baselines against scipy, hand-worked tables and their limits."""
import itertools
import math

import pytest
import torch
from conftest import EOS_ID, make_batch

from oar import baselines


def test_fisher_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    tables = list(itertools.product(range(6), repeat=4)) + [(30, 2, 5, 27), (0, 64, 64, 0), (12, 52, 31, 33)]
    for a, b, c, d in tables:
        if a + b + c + d:
            assert baselines.fisher_exact(a, b, c, d) == pytest.approx(stats.fisher_exact([[a, b], [c, d]]).pvalue, abs=1e-9)


def test_information_gain_closed_form():
    assert baselines.information_gain(4, 0, 0, 4) == pytest.approx(1.0)             # the token tells right from wrong
    assert baselines.information_gain(2, 2, 2, 2) == pytest.approx(0.0)
    assert baselines.information_gain(4, 4, 0, 0) == pytest.approx(0.0)             # occurs everywhere
    # 2 right + 0 wrong hold it, 1 right + 3 wrong do not: H(1/2) - 6/... by hand: 1 - 4/6 * H(1/4)
    h = -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))
    assert baselines.information_gain(2, 0, 1, 3) == pytest.approx(1 - 4 / 6 * h)


def test_key_values_by_hand():
    # token 9 is in both right completions (once in 2 tokens each) and in no wrong one; token 8 is in all of them
    values = baselines.key_values([[9, 8], [9, 8], [8, 8], [8, 8]], [True, True, False, False])
    p = 1 / 3                                          # tables as extreme as (2, 0, 0, 2): 2 of C(4, 2) = 6
    strength = 0.5 * (math.exp(-2 * p) + 1.0)
    tf = 0.5 * 3 / (0.5 + 2 * (0.5 + 0.5 * 4 / 4))     # f = 2/4, both sides have 4 tokens
    direction = math.asin(1) - 0 + tf / 1e-5
    assert values[9] == pytest.approx(math.tanh(strength * direction / 2)) == pytest.approx(1.0)
    assert values[8] == 0.0                            # p = 1 and no information
    mirrored = baselines.key_values([[9, 8], [9, 8], [8, 8], [8, 8]], [False, False, True, True])
    assert mirrored[9] == pytest.approx(-values[9])


def test_ktae_adds_key_values_but_not_to_eos_or_padding(tokenizer):
    batch = make_batch([[5]] * 4, [[9, 8, EOS_ID], [9, 8], [8, 8, 8, EOS_ID], [8, 7]], tokenizer)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    shaped = baselines.ktae(batch, advantages, torch.tensor([1.0, 1, 0, 0]), 4, (EOS_ID,))
    values = baselines.key_values([[9, 8], [9, 8], [8, 8, 8], [8, 7]], [True, True, False, False])
    assert shaped[0].tolist() == pytest.approx([1 + values[9], 1 + values[8], 1.0, 0.0])
    assert shaped[3].tolist() == pytest.approx([-1 + values[8], -1 + values[7], 0.0, 0.0])
    assert values[9] > 0 > values[7]


def test_ktae_of_an_uninformative_group_is_grpo(tokenizer):
    batch = make_batch([[5]] * 2, [[9, 8], [8]], tokenizer)
    assert baselines.ktae(batch, torch.zeros(2), torch.ones(2), 2, (EOS_ID,)).tolist() == [[0, 0], [0, 0]]


def test_entropy_bonus_closed_form():
    entropy, mask = torch.tensor([[0.5, 5.0, 1.0]]), torch.tensor([[True, True, False]])
    assert baselines.entropy_bonus(torch.tensor([-1.0]), entropy, mask).tolist() == [[pytest.approx(-0.8), pytest.approx(-0.5), 0]]
    assert baselines.entropy_bonus(torch.tensor([0.0]), entropy, mask).abs().sum() == 0


def test_inverted_reverses_the_order():
    scores, mask = torch.tensor([[1.0, 3.0, 2.0, 9.0]]), torch.tensor([[True, True, True, False]])
    assert baselines.inverted_importance(scores, mask).tolist() == [[2.0, 0.0, 1.0, 0.0]]


def test_random_is_reproducible():
    mask = torch.ones(3, 5, dtype=torch.bool)
    one, two = (baselines.random_importance(mask, torch.Generator().manual_seed(s)) for s in (0, 0))
    assert torch.equal(one, two) and not torch.equal(one, baselines.random_importance(mask, torch.Generator().manual_seed(1)))
