"""From importance scores to token weights: log, min-max, gate, renormalise (paper section 4.3).

Per completion, over its n reasoning tokens with importance s_t >= 0:

    u   = log1p(s),  then min-max to [0, 1]           heavy-tailed scores become comparable; constant scores -> w = 1
    tau = quantile(u, threshold)
    w_t = max(u_t / tau, floor)                       where u_t <  tau   (suppress)
    w_t = 1 + boost * (u_t - tau) / (1 - tau)         where u_t >= tau   (boost)
    w  <- w * n / sum(w)                              so the completion keeps its total advantage mass

Conclusion, answer and tail tokens keep w = 1.  Every function is pure: a row's weights depend on that row alone.
"""
import torch

GATES = ("both", "boost_only", "suppress_only")


def normalise_scores(scores: torch.Tensor) -> torch.Tensor:
    """log1p then min-max to [0, 1], (n,) float32; all zeros when the scores are constant."""
    u = torch.log1p(scores.float())
    u = u - u.min()
    return u / u.max() if u.max() > 0 else u


def gate_weights(u: torch.Tensor, threshold: float, boost: float, floor: float, gate: str) -> torch.Tensor:
    """Bi-level gate on normalised scores u in [0, 1], (n,) -> weights (n,), before renormalising.

    `boost_only` leaves tokens below tau at 1; `suppress_only` leaves tokens at or above tau at 1.  Ties: when more than
    a `threshold` share of the scores sit at the minimum, tau equals it, nothing lies below and the gate only boosts.
    """
    tau = torch.quantile(u, threshold)
    suppressed = (u / tau).clamp(min=floor) if gate != "boost_only" else torch.ones_like(u)
    boosted = 1 + boost * (u - tau) / (1 - tau) if gate != "suppress_only" and tau < 1 else torch.ones_like(u)
    return torch.where(u < tau, suppressed, boosted)


def row_weights(scores: torch.Tensor, threshold: float = 0.25, boost: float = 1.0, floor: float = 0.1,
                gate: str = "both", renormalise: bool = True) -> torch.Tensor:
    """Weights of one completion's reasoning tokens: scores (n,) >= 0 -> weights (n,) float32 with sum n."""
    u = normalise_scores(scores) if scores.numel() else scores.float()
    if u.numel() < 2 or u.max() == 0:
        return torch.ones_like(u)
    w = gate_weights(u, threshold, boost, floor, gate)
    return w * w.numel() / w.sum() if renormalise else w


def reshape(importance: torch.Tensor, reasoning_mask: torch.Tensor, **settings) -> torch.Tensor:
    """Token weights of a batch.

    importance (B, T) float, reasoning_mask (B, T) bool -> weights (B, T) float32, 1 wherever the mask is False.
    `settings` are those of `row_weights`.  With renormalising, sum_t w_t over reasoning tokens = their number, so
    sum_t w_t * A_i is GRPO's.
    """
    weights = torch.ones_like(importance, dtype=torch.float32)      # (B, T)
    for row, mask in enumerate(reasoning_mask):
        if mask.any():
            weights[row, mask] = row_weights(importance[row, mask], **settings)
    return weights
