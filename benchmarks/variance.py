"""Gradient variance by method, on the lab: the same completions and the same policy for all, only the credit differs.

    python -m benchmarks.variance                                      # 64 steps, 12 methods, 2 policies: about 20 minutes on one core
    python -m benchmarks.variance --methods grpo oar_g --steps 32 --policies start

The unit is the gradient of one training step of the study (4 problems x 4 completions).  S independent steps of one policy give
the variance of a step's gradient, the part of it that sits at nuisance tokens (the lab's fillers) and the cosine of a step's
gradient with the mean of the S - 1 others, of the same method and of GRPO (oar/gradvar.py).  Two policies: the warm start, and
the same after 40 steps of GRPO.

1. "filler w=..." are not methods but the paper's thought experiment (A.1.4): GRPO, with the known fillers' weight set to w,
   other tokens as they were (`kept`) or scaled so that the weights still sum to the number of tokens (`renormalised`).
2. Variances depend on how large the weights are, so each is also divided by the signal, the squared expected gradient.
3. "mass" is how much a completion's total advantage changes, mean of sum_t (A_t - A_i) per completion; 0 for weights that sum to n.
4. Intervals: 95 %, steps resampled; ratios to GRPO resample the same steps for both.

Writes benchmarks/results/variance.json.
"""
import argparse
import json
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import train
from benchmarks.intervals import cell
from benchmarks.study import RUNS, configure, train_steps, warm_start
from benchmarks.study_plan import METHODS, SETTINGS, Job
from oar import data, gradvar, grpo, lab, models, record
from oar.batch import random_stream
from oar.checkpoint import write_atomically
from oar.credit import assign_credit
from oar.errors import exit_cleanly
from oar.metrics import ess_ratio, top_mass
from oar.rollout import draw_uniforms, sample
from oar.verify import is_correct

RESULT = Path(__file__).parent / "results" / "variance.json"
SEED = 2000                                          # of problems and samples: no run of the study uses it
POLICIES = {"start": 0, "trained": 40}               # steps of GRPO before measuring
FILLER_WEIGHTS = (1.0, 0.5, 0.25, 0.1, 0.0)
RESAMPLES = 2000


def prepare(setting_name: str, steps: int):
    """(policy after `steps` of GRPO, its Config)."""
    setting = SETTINGS[setting_name]
    config = configure(Job(setting_name, "grpo", SEED), setting, warm_start(setting, RUNS))
    policy = models.load(config.model, torch.device("cpu"))
    examples, _, _ = train.load_examples(config, policy)
    for _ in train_steps(policy, examples, config, steps):
        pass
    return policy, config


def rollout(policy, config, step: int, split: str = "train"):
    """Completions of one step's problems: (batch, rewards, advantages, roles)."""
    examples = data.lab_examples(split, config.prompts_per_step, config.instructions, SEED + 1 + step)
    prompts = [data.encode_prompt(policy, e.problem) for e in examples]
    uniforms = draw_uniforms(len(prompts) * config.group_size, config.max_new_tokens, random_stream(SEED, step, "variance"))
    batch = sample(policy, prompts, config.group_size, config.max_new_tokens, uniforms)
    owners = [e for e in examples for _ in range(config.group_size)]
    rewards = torch.tensor([float(is_correct(text, e.answer)) for text, e in zip(batch.texts, owners)])
    return batch, rewards, grpo.group_advantages(rewards, config.group_size), record.lab_roles(policy, batch, owners)


def filler_mask(batch, roles) -> torch.Tensor:
    """The nuisance tokens, (B, T) bool."""
    return lab.role_mask(roles, batch.completion_mask.shape[1], lambda role: role.kind == "filler")


def weigh_fillers(filler: torch.Tensor, mask: torch.Tensor, weight: float, renormalise: bool) -> torch.Tensor:
    """Weights (B, T): `weight` on fillers, 1 elsewhere; or, renormalised, the others so large that the row's sum is its length."""
    w = torch.where(filler, weight, 1.0) * mask
    if not renormalise:
        return w
    count, fillers = mask.sum(1, keepdim=True), filler.sum(1, keepdim=True)
    return torch.where(filler, w, w * (count - weight * fillers) / (count - fillers).clamp(min=1))


def credits(policy, config, batch, rewards, advantages, roles, methods, step: int) -> dict[str, dict]:
    """Token advantages (B, T) of every method and of the thought experiment, with ESS ratio and top-10 % mass of the methods."""
    rows = {}
    for method in methods:
        config.method = method
        credit = assign_credit(policy, batch, rewards, advantages, config, config.group_size, 1.0,
                               random_stream(SEED, step, method), 32768, roles)
        reasoning = credit.reasoning_mask & (advantages != 0)[:, None]
        rows[method] = {"advantages": credit.token_advantages, "ess": ess_ratio(credit.weights, reasoning),
                        "top": top_mass(credit.token_advantages, batch.completion_mask)}
    filler = filler_mask(batch, roles)
    for name, renormalise in (("kept", False), ("renormalised", True)):
        for weight in FILLER_WEIGHTS[1:]:
            w = weigh_fillers(filler, batch.completion_mask, weight, renormalise)
            rows[f"filler w={weight:g}, {name}"] = {"advantages": w * advantages[:, None]}
    return rows


def measure(policy, config, methods, steps: int) -> dict[str, dict]:
    """Per row the gradients' inner products, of the whole and of the filler part, with GRPO's, and the means of its other numbers."""
    rollouts, credited = [], []
    for step in tqdm(range(steps), desc="completions and credit"):
        batch, rewards, advantages, roles = rollout(policy, config, step)
        coefficients = grpo.loss_coefficients(batch.completion_mask, config.loss_norm, config.max_new_tokens)
        rollouts.append((batch, advantages, coefficients, filler_mask(batch, roles)))
        credited.append(credits(policy, config, batch, rewards, advantages, roles, methods, step))
    tables, reference = {}, None
    for name in tqdm(credited[0], desc="gradients"):                                 # method by method: (S, parameters) is large
        whole, nuisance, mass = [], [], []
        for (batch, advantages, coefficients, filler), rows in zip(rollouts, credited):
            a = rows[name]["advantages"]
            whole.append(gradvar.step_gradient(policy.model, batch, a, coefficients))
            nuisance.append(gradvar.step_gradient(policy.model, batch, a * filler, coefficients))
            mass += (a - advantages[:, None] * batch.completion_mask).sum(1)[advantages != 0].tolist()
        whole, nuisance = torch.stack(whole), torch.stack(nuisance)                  # (S, parameters)
        reference = whole if reference is None else reference                        # GRPO comes first
        tables[name] = {"own": gradvar.inner_products(whole), "grpo": gradvar.inner_products(whole, reference),
                        "filler": gradvar.inner_products(nuisance), "mass": float(np.mean(mass)),
                        **{key: float(np.nanmean([rows[name][key] for rows in credited])) for key in ("ess", "top") if key in rows[name]}}
    return tables


def summarise(tables: dict[str, dict]) -> dict[str, dict]:
    """Every row's numbers as [value, low, high]; `*_ratio` and `*_gain` are relative to GRPO, steps resampled together."""
    base, rng = tables["grpo"], np.random.default_rng(0)
    count = len(base["own"])
    draws = [torch.from_numpy(rng.permutation(count)[:count // 2].copy()) for _ in range(RESAMPLES)]
    plain = gradvar.cosines(base["own"], base["own"], base["own"])

    def interval(estimate) -> list[float]:
        """Of `estimate(index of steps)`: half-samples spread as the whole's estimate does (delete-half jackknife)."""
        value, spread = estimate(torch.arange(count)), 1.96 * np.std([estimate(at) for at in draws])
        return [round(float(x), 6) for x in (value, value - spread, value + spread)]

    def of(table: dict, part: str, what):
        """Index of steps -> variance or signal of those steps' gradients."""
        return lambda at: what(table[part][at][:, at])

    def ratio(a, b):
        return lambda at: a(at) / b(at)

    rows = {}
    for name, t in tables.items():
        spread, pull, at_fillers = of(t, "own", gradvar.variance), of(t, "own", gradvar.signal), of(t, "filler", gradvar.variance)
        base_spread, base_pull = of(base, "own", gradvar.variance), of(base, "own", gradvar.signal)
        numbers = {"variance_ratio": ratio(spread, base_spread), "filler_ratio": ratio(at_fillers, of(base, "filler", gradvar.variance)),
                   "filler_share": ratio(at_fillers, spread), "signal_ratio": ratio(pull, base_pull), "noise": ratio(spread, pull),
                   "noise_ratio": ratio(ratio(spread, pull), ratio(base_spread, base_pull))}
        for key, cosine in (("cosine_own", gradvar.cosines(t["own"], t["own"], t["own"])),
                            ("cosine_grpo", gradvar.cosines(t["own"], t["grpo"], base["own"]))):
            numbers[key] = lambda at, cosine=cosine: cosine[at].mean().item()
            numbers[f"{key}_gain"] = lambda at, cosine=cosine: (cosine - plain)[at].mean().item()
        rows[name] = {key: interval(estimate) for key, estimate in numbers.items()}
        rows[name] |= {key: round(t[key], 5) for key in ("ess", "top", "mass") if key in t}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--steps", type=int, default=64, help="steps whose gradients are compared")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    methods, results = list(dict.fromkeys(["grpo", *args.methods])), {}
    for policy_name in args.policies:
        policy, config = prepare("main", POLICIES[policy_name])
        results[policy_name] = summarise(measure(policy, config, methods, args.steps))
        show(policy_name, results[policy_name], args.steps)
        write_atomically(RESULT, json.dumps({"steps": args.steps, "seed": SEED, "policies": results}, indent=1) + "\n")


def show(policy_name: str, rows: dict, steps: int) -> None:
    """One line per method: what it does to the variance, the signal and the direction."""
    shown = {"variance_ratio": "variance", "filler_ratio": "filler variance", "signal_ratio": "signal", "noise_ratio": "variance / signal",
             "cosine_own": "cosine, own large batch", "cosine_grpo": "cosine, GRPO's large batch"}
    heads = " | ".join([*shown.values(), "ESS", "top 10 %", "mass"])
    print(f"\npolicy: {policy_name}; {steps} steps; the first four relative to GRPO\n\n| | {heads} |\n|---|{'---|' * (len(shown) + 3)}")
    for name, row in rows.items():
        cells = [cell(row[key], 2) for key in shown]
        cells += [f"{row[key]:.2f}" if key in row else "" for key in ("ess", "top", "mass")]
        print(f"| `{name}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    exit_cleanly(main)
