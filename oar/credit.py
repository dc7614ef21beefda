"""From a method's name to token advantages: the one place where methods are told apart.

    weights   = reshape(importance)                          grpo: all ones
    A_t       = w_t * A_i                                    entropy_bonus and ktae shape the advantage itself
"""
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch

from oar import baselines, gradnoise, lab, perturb, total, totalgrad
from oar.batch import Batch
from oar.errors import UserError
from oar.flags import flag
from oar.models import Policy
from oar.probe import FORCED_CONCLUSION, build_probe, reasoning_mask, segment
from oar.reshape import reshape

METHODS = ("grpo", "oar_p", "oar_g", "oar_f", "oar_t", "oar_tg", "random", "entropy", "entropy_bonus", "ktae", "roles", "inverted")


@dataclass
class CreditConfig:
    """How credit is spread over the tokens of a completion."""
    method: Literal[METHODS] = flag("oar_g", "Credit assignment (README: table of methods).")
    probe: Literal["last", "answer_mean", "answer_joint"] = flag("answer_mean", "What counts as the outcome.")
    perturb: Literal["auto", "mask", "resample", "other"] = flag("auto", "OAR-P, oar_t: what replaces a token; other: the policy's best other token (auto: mask for OAR-P, other for oar_t).")
    noise_std: float = flag(1e-3, "OAR-G: standard deviation of the embedding noise.")
    noise_draws: int = flag(1, "OAR-G, oar_tg: random draws whose scores are averaged.")
    fisher_samples: int = flag(1, "oar_f: outcomes sampled per completion (1 to 8 rank alike in the lab).")
    gate: Literal["both", "boost_only", "suppress_only"] = flag("both", "Which half of the gate acts.")
    threshold: float = flag(0.25, "Quantile of the scores that separates suppressed from boosted tokens.")
    boost: float = flag(1.0, "Extra weight of the most important token, before renormalising (paper: beta).")
    floor: float = flag(0.1, "Least weight of a suppressed token, before renormalising.")
    renormalise: bool = flag(True, "Scale the weights so that a completion keeps its advantage mass.")


def check_credit(config: CreditConfig) -> None:
    """UserError for a choice that does not exist or a number out of range; a mistyped method must not train another one."""
    for setting in fields(CreditConfig):
        value, choices = getattr(config, setting.name), get_args(setting.type)
        if choices and value not in choices:
            raise UserError(f"--{setting.name} must be one of {', '.join(choices)}, got {value!r}")
    checks = [(name, getattr(config, name) > 0, "positive") for name in ("noise_std", "noise_draws", "fisher_samples")]
    checks += [(name, 0 <= getattr(config, name) <= 1, "between 0 and 1") for name in ("threshold", "floor")]
    for name, fine, want in [*checks, ("boost", config.boost >= 0, "at least 0")]:
        if not fine:
            raise UserError(f"--{name.replace('_', '-')} must be {want}, got {getattr(config, name)}")


@dataclass
class Credit:
    """Result of `assign_credit`; all (B, T) on the batch's device."""
    token_advantages: torch.Tensor    # float32, 0 on padding
    weights: torch.Tensor             # float32, 1 on tokens that are not reasoning
    importance: torch.Tensor          # float32, 0 where nothing was scored
    reasoning_mask: torch.Tensor      # bool
    finite: bool = True               # False: some importance was NaN or infinite, and all weights are 1 instead


def score_importance(policy: Policy, batch: Batch, segments, config: CreditConfig, temperature: float,
                     generator: torch.Generator, token_budget: int, roles: list | None = None) -> torch.Tensor:
    """Importance (B, T) >= 0 by any method that goes through the gate; 0 outside the reasoning.

    `roles` (lab.label_tokens per row) is needed by method "roles" only.
    """
    model, tokenizer, method = policy.model, policy.tokenizer, config.method
    mask = reasoning_mask(batch, segments)                                           # (B, T)
    if method == "random":
        return baselines.random_importance(mask, generator) * mask
    if method == "entropy":
        return batch.entropy * mask
    if method == "roles":
        return (lab.role_mask(roles, mask.shape[1], lambda role: role.matters).to(mask.device) & mask).float()

    conclusion = lab.CONCLUSION if policy.is_lab else FORCED_CONCLUSION
    forced_ids = tokenizer.encode(conclusion, add_special_tokens=False)
    probe = build_probe(batch, segments, config.probe, forced_ids, tokenizer.pad_token_id)
    if method == "oar_g":
        scores = gradnoise.oar_g(model, probe, config.noise_std, config.noise_draws, generator, token_budget)
    elif method == "oar_f":
        scores = gradnoise.oar_f(model, probe, config.fisher_samples, generator, token_budget)
    elif method == "oar_tg":
        scores = totalgrad.oar_tg(model, probe, config.noise_draws, generator, token_budget)
    else:                                                                            # oar_p, inverted, oar_t
        edit = config.perturb if config.perturb != "auto" else "other" if method == "oar_t" else "mask"
        if edit == "mask":
            edits = perturb.mask_edits(probe, tokenizer.pad_token_id)
        else:
            edits = perturb.resample_edits(model, probe, 0.0 if edit == "other" else temperature, generator, token_budget)
        scores = (total.oar_t if method == "oar_t" else perturb.oar_p)(model, probe, edits, token_budget)    # (B, S)

    importance = torch.zeros(mask.shape, device=mask.device)                         # S and T may differ: copy what both hold
    width = min(scores.shape[1], mask.shape[1])
    importance[:, :width] = scores[:, :width]
    importance = importance.masked_fill(~mask, 0.0)
    return baselines.inverted_importance(importance, mask) if method == "inverted" else importance


def assign_credit(policy: Policy, batch: Batch, rewards: torch.Tensor, advantages: torch.Tensor, config: CreditConfig,
                  group_size: int, temperature: float, generator: torch.Generator, token_budget: int,
                  roles: list | None = None, own: torch.Tensor | None = None) -> Credit:
    """Token advantages (B, T) from completion advantages (B,).

    Completions whose advantage is exactly 0 are not scored (0 * w = 0): exact, and a large saving.  `own` (B, T) bool
    marks the tokens that the policy wrote itself; the others (a tool's output) are read but get no weight but 1.
    """
    segments = [segment(policy.tokenizer, batch.row_ids(row), policy.eos_ids) for row in range(len(batch))]
    reasoning = reasoning_mask(batch, segments)                                      # (B, T)
    if own is not None:
        reasoning = reasoning & own
    importance = torch.zeros(reasoning.shape, device=reasoning.device)
    weights = torch.ones_like(importance)
    mask = batch.completion_mask
    if config.method == "entropy_bonus":
        return Credit(baselines.entropy_bonus(advantages, batch.entropy, mask), weights, importance, reasoning)
    if config.method == "ktae":
        return Credit(baselines.ktae(batch, advantages, rewards, group_size, policy.eos_ids), weights, importance, reasoning)

    scored = advantages.nonzero()[:, 0].tolist()
    if config.method != "grpo" and scored:
        part = batch.rows(scored)
        scores = score_importance(policy, part, [segments[row] for row in scored], config, temperature, generator,
                                  token_budget, [roles[row] for row in scored] if roles else None)
        if not scores.isfinite().all():
            return Credit(advantages[:, None] * mask, weights, importance, reasoning, finite=False)
        importance[scored, :scores.shape[1]] = scores
        weights[scored] = reshape(importance[scored], reasoning[scored], threshold=config.threshold, boost=config.boost,
                                  floor=config.floor, gate=config.gate, renormalise=config.renormalise)
    return Credit(weights * advantages[:, None] * mask, weights, importance, reasoning)
