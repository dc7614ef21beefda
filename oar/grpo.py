"""GRPO: group advantages, log-probabilities and the clipped surrogate (paper section 3; arXiv 2402.03300).

    A_i      = (r_i - mean_g r) / (std_g r + eps)                       advantage of completion i inside its group
    ratio_t  = exp(logprob_t - old_logprob_t)
    loss     = - sum_t c_t * min(ratio_t * A_t, clip(ratio_t, 1 - eps_low, 1 + eps_high) * A_t)  + kl_beta * sum_t c_t * k3_t

A_t is the token's advantage (OAR: w_t * A_i) and c_t the coefficient that carries the whole normalisation.  Since c is
fixed for the step before it is cut into micro-batches, the memory knob changes neither loss nor gradient.

Differences named: the standard deviation is the sample one (n - 1), as in TRL; eps is 1e-4; dropout is off in
training (models.py), so the old and the new log-probabilities of the first pass are the same numbers.
"""
import math
from contextlib import nullcontext

import torch
from torch.utils.checkpoint import checkpoint

from oar import halving
from oar.batch import Batch, chunks_by_budget, position_ids

LOSS_NORMS = ("sequence", "token", "constant")
LOGIT_ROWS = 2048             # positions whose logits are turned to float32 together
MAX_LOG_RATIO = 20.0          # exp(20) = 5e8: beyond any clip, yet finite in value and gradient


def group_advantages(rewards: torch.Tensor, group_size: int, eps: float = 1e-4) -> torch.Tensor:
    """A_i = (r_i - mean) / (std + eps) inside consecutive groups of `group_size`; (B,) -> (B,) float32.

    A group whose rewards are all equal gets exactly 0 (no rounding residue, no NaN).  A completion without a finite reward
    leaves its group: it gets 0, and the others are compared among themselves.  Raises ValueError when group_size < 2 or it
    does not divide B.
    """
    if group_size < 2 or rewards.numel() % group_size:
        raise ValueError(f"group_size must be at least 2 and divide {rewards.numel()}, got {group_size}")
    groups = rewards.float().view(-1, group_size)                                    # (B/G, G)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = centred / (groups.std(1, keepdim=True) + eps)
    equal = (groups == groups[:, :1]).all(1, keepdim=True)
    advantages = torch.where(equal, torch.zeros_like(advantages), advantages)        # (B/G, G)
    for group, kept in enumerate(groups.isfinite()):
        if not kept.all():
            advantages[group] = 0
        if 1 < kept.sum() < group_size:
            advantages[group, kept] = group_advantages(groups[group, kept], int(kept.sum()), eps)
    return advantages.flatten()                                                      # (B,)


def loss_coefficients(completion_mask: torch.Tensor, norm: str, max_new_tokens: int, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Per-token coefficients c (B, T) float32, 0 on padding, computed once for the whole step.

    Completions that are not `kept` (B,) have no loss and do not count among the B either.

    sequence: 1 / (B * n_i), the mean over a completion's tokens and then over completions (the paper's)
    token:    1 / sum_i n_i, the mean over all tokens of the step (DAPO)
    constant: 1 / (B * max_new_tokens), so that length neither dilutes nor amplifies (Dr. GRPO)
    """
    mask, completions = completion_mask.float(), len(completion_mask)
    if kept is not None:
        mask, completions = mask * kept[:, None], max(1, int(kept.sum()))
    if norm == "sequence":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / completions
    if norm == "token":
        return mask / mask.sum().clamp(min=1)
    return mask / (completions * max_new_tokens)


def _select_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    return logits.gather(-1, ids[:, None])[:, 0] - logits.logsumexp(-1)


def selected_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float, rows: int = LOGIT_ROWS) -> torch.Tensor:
    """log softmax(logits / temperature)[ids] in float32: (N, V), (N,) -> (N,).

    Gather minus logsumexp over `rows` rows at a time, recomputed in the backward pass: no float32 copy of all the
    logits is ever kept.
    """
    parts = [checkpoint(_select_logprobs, logits[i:i + rows], ids[i:i + rows], temperature, use_reentrant=False)
             for i in range(0, len(ids), rows)]
    return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float32)


def completion_logprobs(model, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of every completion token at the sampling temperature, (B, T) float32, 0 on padding.

    The LM head runs only on positions that predict a completion token.
    """
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)                     # (B, P+T)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], 1)                  # (B, P+T)
    predicts = torch.zeros_like(mask)
    predicts[:, batch.prompt_ids.shape[1] - 1:-1] = batch.completion_mask            # column before each token
    logits = model(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask),
                   use_cache=False, logits_to_keep=predicts).logits                  # (N, V), N = completion tokens
    logprobs = selected_logprobs(logits, batch.completion_ids[batch.completion_mask], temperature)
    # both masks are read row by row, so the flat list of log-probs goes back to the tokens it came from
    return torch.zeros(batch.completion_mask.shape, device=ids.device).masked_scatter(batch.completion_mask, logprobs)


def policy_loss(logprobs: torch.Tensor, old_logprobs: torch.Tensor, token_advantages: torch.Tensor,
                coefficients: torch.Tensor, clip_low: float = 0.2, clip_high: float = 0.2,
                ref_logprobs: torch.Tensor | None = None, kl_beta: float = 0.0) -> torch.Tensor:
    """The clipped surrogate, plus kl_beta times the k3 estimate of KL(policy || reference); all (B, T) -> scalar.

    Log-ratios are clamped before exp, so neither the value nor the gradient can overflow.  A group without advantage
    contributes its KL term only (nothing at all when kl_beta = 0).
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()     # (B, T)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * token_advantages, clipped * token_advantages)
    if ref_logprobs is not None:
        log_r = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        loss = loss + kl_beta * (log_r.exp() - log_r - 1)
    return (loss * coefficients).sum()


def update(model, optimizer, batch: Batch, token_advantages: torch.Tensor, coefficients: torch.Tensor, *, temperature: float,
           inner_epochs: int, token_budget: int, clip_low: float, clip_high: float, max_grad_norm: float,
           ref_model=None, kl_beta: float = 0.0, autocast=nullcontext) -> dict[str, float]:
    """Improve the policy on one rollout: `inner_epochs` optimiser steps against the same old log-probabilities.

    Rows without any advantage are left out when kl_beta = 0, since their gradient is exactly 0; a step with nothing to
    learn from changes no weight (Adam's momentum would otherwise move them).  When memory runs out, the pass starts over
    with half the `token_budget`.  A pass whose loss or gradient is not finite changes no weight either, and is the last.

    Returns loss, grad_norm (before clipping), clip_fraction, approx_kl (k3) and, with a reference, kl_ref; averages over
    tokens and inner epochs; and skipped: "loss", "gradient" or None.
    """
    rows = range(len(batch)) if ref_model else (token_advantages != 0).any(1).nonzero()[:, 0].tolist()
    sums = {"loss": 0.0, "grad_norm": 0.0, "clip_fraction": 0.0, "approx_kl": 0.0, **({"kl_ref": 0.0} if ref_model else {}), "skipped": None}
    if not rows:
        return sums
    batch, token_advantages, coefficients = batch.rows(list(rows)), token_advantages[rows], coefficients[rows]
    lengths = (batch.prompt_mask.sum(1) + batch.completion_mask.sum(1)).tolist()
    tokens = int(batch.completion_mask.sum())
    old = torch.zeros(batch.completion_mask.shape, device=batch.completion_ids.device)            # (B, T)

    def backward(epoch: int, chunk: list[int]) -> dict[str, float]:
        part = batch.rows(chunk)
        t = part.completion_ids.shape[1]
        with autocast():
            logprobs = completion_logprobs(model, part, temperature)                              # (R, t)
        if epoch == 0:
            old[chunk, :t] = logprobs.detach()       # the policy has not moved yet: ratio = 1 without an extra forward
        old_logprobs, ref_logprobs = old[chunk, :t], None
        if ref_model:
            with torch.no_grad(), autocast():
                ref_logprobs = completion_logprobs(ref_model, part, temperature)
        loss = policy_loss(logprobs, old_logprobs, token_advantages[chunk, :t], coefficients[chunk, :t], clip_low, clip_high,
                           ref_logprobs, kl_beta)
        loss.backward()
        drift = _drift(logprobs.detach(), old_logprobs, ref_logprobs, part.completion_mask, clip_low, clip_high)
        return {"loss": loss.item(), **{name: value / tokens for name, value in drift.items()}}

    for epoch in range(inner_epochs):
        parts = None
        while parts is None:
            optimizer.zero_grad(set_to_none=True)    # also drops what a pass that ran out of memory had gathered
            try:
                parts = [backward(epoch, chunk) for chunk in chunks_by_budget(lengths, halving.allowed(token_budget))]
            except (RuntimeError, MemoryError) as error:
                rows_at_once = len(chunks_by_budget(lengths, halving.allowed(token_budget))[0])
                if not halving.ran_out(error) or rows_at_once == 1:
                    raise
                token_budget = halving.halve(rows_at_once, max(lengths) * (rows_at_once // 2))
        for part in parts:
            for name, value in part.items():
                sums[name] += value / inner_epochs
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item()
        sums["grad_norm"] += grad_norm / inner_epochs
        if not (math.isfinite(sums["loss"]) and math.isfinite(grad_norm)):
            sums["skipped"] = "gradient" if math.isfinite(sums["loss"]) else "loss"
            break
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return sums


def _drift(logprobs, old_logprobs, ref_logprobs, mask, clip_low: float, clip_high: float) -> dict[str, float]:
    """Sums over tokens of what says how far the policy has moved."""
    log_ratio = (logprobs - old_logprobs)[mask]
    ratio = log_ratio.exp()
    sums = {"clip_fraction": ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).sum().item(),
            "approx_kl": (ratio - 1 - log_ratio).sum().item()}
    if ref_logprobs is not None:
        log_r = (ref_logprobs - logprobs)[mask]
        sums["kl_ref"] = (log_r.exp() - log_r - 1).sum().item()
    return sums
