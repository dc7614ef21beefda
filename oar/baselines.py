"""Other ways to spread credit over tokens, to compare with OAR.

Importance that goes through the same gate as OAR's:
    random       uniform numbers: what any reweighting does
    entropy      the token's sampling entropy
    roles        (lab only) the tokens known to be pivotal: the ceiling of any attribution
    inverted     OAR-P's importance upside down: if that does not hurt, the signal carries nothing (after 2602.09331)

Additive shaping of the advantage:
    entropy_bonus   A + min(alpha * H_t, |A| / kappa), H_t detached                         (arXiv 2506.14758)
    ktae            A + key value of the token, from 2x2 tables of the group                 (arXiv 2505.16826)
"""
import math
from functools import lru_cache

import torch

from oar.batch import Batch

BM25_K1, BM25_B = 2.0, 0.5


def random_importance(mask: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Independent uniform scores (B, T), from `generator` (on the CPU)."""
    return torch.rand(mask.shape, generator=generator).to(mask.device)


def inverted_importance(importance: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The row's largest score minus the score, (B, T); zero where mask is False."""
    top = importance.masked_fill(~mask, 0.0).amax(1, keepdim=True)
    return (top - importance).masked_fill(~mask, 0.0)


def entropy_bonus(advantages: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor,
                  alpha: float = 0.4, kappa: float = 2.0) -> torch.Tensor:
    """A_i + min(alpha * H_t, |A_i| / kappa): advantages (B,), entropy (B, T) in nats -> token advantages (B, T).

    The bonus is positive whatever the sign of A and vanishes with it; padding stays 0.
    """
    bonus = torch.minimum(alpha * entropy.detach(), advantages.abs()[:, None] / kappa)
    return (advantages[:, None] + bonus) * mask


# --------------------------------------------------------------------------------------------------------------------
# KTAE

@lru_cache(maxsize=65536)
def fisher_exact(a: int, b: int, c: int, d: int) -> float:
    """Two-sided p-value of Fisher's exact test for the table [[a, b], [c, d]]: the total probability, under fixed
    margins, of the tables that are not likelier than this one (scipy.stats.fisher_exact's definition)."""
    n, row, column = a + b + c + d, a + b, a + c

    def probability(x: int) -> float:
        return math.comb(row, x) * math.comb(n - row, column - x) / math.comb(n, column)

    observed = probability(a)
    possible = range(max(0, column - (n - row)), min(row, column) + 1)
    return min(1.0, sum(p for p in map(probability, possible) if p <= observed * (1 + 1e-7)))


def information_gain(a: int, b: int, c: int, d: int) -> float:
    """Bits that knowing whether the token occurs (a right, b wrong) or not (c right, d wrong) tells about correctness."""
    def entropy(right: int, wrong: int) -> float:
        shares = [k / (right + wrong) for k in (right, wrong) if k]
        return -sum(p * math.log2(p) for p in shares)

    n = a + b + c + d
    return entropy(a + c, b + d) - (a + b) / n * entropy(a, b) - (c + d) / n * entropy(c, d)


def association(a: int, b: int, c: int, d: int) -> float:
    """Strength of a token's tie to correctness: 1/2 (exp(-2p) + IG), where the first term is 0 when p = 1."""
    p = fisher_exact(a, b, c, d)
    return 0.5 * ((math.exp(-2 * p) if p < 1.0 else 0.0) + information_gain(a, b, c, d))


def saturated_frequency(count: int, length: int, mean_length: float) -> float:
    """BM25 saturation of a token's relative frequency in the right (wrong) completions of a group.

    f (k1 + 1) / (f + k1 (1 - b + b * length / mean_length)) with f = count / length, k1 = 2, b = 0.5.
    """
    f = count / max(1, length)
    return f * (BM25_K1 + 1) / (f + BM25_K1 * (1 - BM25_B + BM25_B * length / mean_length))


def key_values(completions: list[list[int]], right: list[bool]) -> dict[int, float]:
    """KTAE's key value in (-1, 1) of every distinct token id of one group.

    2 * (sigmoid(association * direction) - 1/2), with direction = asin(sqrt(share of right completions that hold the
    token)) - asin(sqrt(share of wrong ones)) + tf_right / tf_wrong - tf_wrong / tf_right.  Denominators carry + 1e-5, as
    in the authors' code, so a token that occurs on one side only gets a key value near +-1.
    """
    n_right, n_wrong = sum(right), len(right) - sum(right)
    lengths = {side: sum(len(ids) for ids, r in zip(completions, right) if r == side) for side in (True, False)}
    mean_length = sum(lengths.values()) / 2
    values = {}
    for token in set().union(*completions):
        holds = [token in ids for ids in completions]
        a = sum(h and r for h, r in zip(holds, right))
        b = sum(holds) - a
        tf = {side: saturated_frequency(sum(ids.count(token) for ids, r in zip(completions, right) if r == side),
                                        lengths[side], mean_length) for side in (True, False)}
        direction = math.asin(math.sqrt(a / max(1, n_right))) - math.asin(math.sqrt(b / max(1, n_wrong)))
        direction += tf[True] / (tf[False] + 1e-5) - tf[False] / (tf[True] + 1e-5)
        x = association(a, b, n_right - a, n_wrong - b) * direction
        values[token] = math.tanh(x / 2)             # = 2 * (sigmoid(x) - 1/2), without overflow
    return values


def ktae(batch: Batch, advantages: torch.Tensor, rewards: torch.Tensor, group_size: int,
         eos_ids: tuple[int, ...]) -> torch.Tensor:
    """A_i + key value of the token, (B, T); EOS and padding get no key value. A completion is right when its reward
    is above its group's midpoint; one without a finite reward is left out."""
    shaped = advantages[:, None] * batch.completion_mask                             # (B, T)
    for start in range(0, len(batch), group_size):
        group = [row for row in range(start, start + group_size) if rewards[row].isfinite()]
        reward = rewards[group]
        right = (reward > (reward.max() + reward.min()) / 2).tolist() if group else []
        if len(set(right)) < 2:
            continue                                 # all right or all wrong: nothing to tell apart
        completions = [[t for t in batch.row_ids(row) if t not in eos_ids] for row in group]
        values = key_values(completions, right)
        for row in group:
            ids = batch.row_ids(row)
            bonus = [0.0 if t in eos_ids else values[t] for t in ids]
            shaped[row, :len(ids)] += torch.tensor(bonus, device=shaped.device)
    return shaped
