"""Numbers that are logged, each defined once."""
import math

import torch


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean of `values` where `mask` is True; NaN when it is nowhere."""
    return values[mask].float().mean().item() if mask.any() else math.nan


def ess_ratio(weights: torch.Tensor, mask: torch.Tensor) -> float:
    """Effective sample size of the token weights, (sum w)^2 / (n sum w^2), mean over rows (B, T) that have tokens.

    1 for uniform weights, 1/n when one token carries everything.
    """
    ratios = [w.sum().square() / (len(w) * w.square().sum()) for w in (row[m] for row, m in zip(weights, mask)) if len(w)]
    return torch.stack(ratios).mean().item() if ratios else math.nan


def top_mass(token_advantages: torch.Tensor, mask: torch.Tensor, share: float = 0.1) -> float:
    """Share of sum |w A| carried by the top 10% of a row's tokens (at least one), mean over rows with any advantage."""
    masses = []
    for row, m in zip(token_advantages.abs(), mask):
        values = row[m]
        if len(values) and values.sum() > 0:
            masses.append(values.topk(max(1, round(share * len(values)))).values.sum() / values.sum())
    return torch.stack(masses).mean().item() if masses else math.nan


def informative_share(advantages: torch.Tensor, group_size: int) -> float:
    """Share of groups with some non-zero advantage: with success rate p it is about 1 - p^G - (1 - p)^G."""
    return (advantages.view(-1, group_size) != 0).any(1).float().mean().item()


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased pass@k from n samples of which `correct` are right: 1 - C(n - c, k) / C(n, k). ValueError when k > n."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory in MiB: allocated on a CUDA device, else the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 20
    import resource
    import sys
    unit = 2 ** 20 if sys.platform == "darwin" else 2 ** 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
