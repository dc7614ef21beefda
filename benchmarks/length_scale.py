"""How much advantage a method adds to a completion, by length (paper, appendix A.1.2).

    python -m benchmarks.length_scale                                  # main, long6 and long8: a few minutes on one core

A completion of n tokens carries n A_i under GRPO, and under any weights that sum to n.  Additive shaping adds sum_t (A_t - A_i):
here is that sum per completion ("mass", what a loss divided by a constant sees) and per token (what a loss averaged over the
completion's own tokens sees), for sampled completions of 4, 6 and 8 instructions, each by its own warm-start policy.
Growth is the difference between the longest and the shortest, with a 95 % bootstrap interval over completions.  The
warm-start policies of the longer settings are built first if they are not there.

Writes benchmarks/results/length_scale.json.
"""
import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.intervals import cell
from benchmarks.study_claims import interval
from benchmarks.variance import SEED, prepare, rollout
from oar.batch import random_stream
from oar.checkpoint import write_atomically
from oar.credit import assign_credit
from oar.errors import exit_cleanly

RESULT = Path(__file__).parent / "results" / "length_scale.json"
SETTINGS, METHODS, STEPS = ("main", "long6", "long8"), ("grpo", "entropy_bonus", "ktae", "oar_g", "entropy"), 40


def added_mass(setting: str) -> tuple[list[int], dict[str, list[float]]]:
    """(tokens, {method: sum_t (A_t - A_i)}) of the completions that have an advantage."""
    policy, config = prepare(setting, 0)
    tokens, mass = [], {method: [] for method in METHODS}
    for step in range(STEPS):
        batch, rewards, advantages, roles = rollout(policy, config, step)
        scored = advantages != 0
        tokens += batch.completion_mask.sum(1)[scored].tolist()
        for method in METHODS:
            config.method = method
            stream = random_stream(SEED, step, method)
            credit = assign_credit(policy, batch, rewards, advantages, config, config.group_size, 1.0, stream, 32768, roles)
            mass[method] += (credit.token_advantages - advantages[:, None] * batch.completion_mask).sum(1)[scored].tolist()
    return tokens, mass


def growth(short: np.ndarray, long: np.ndarray) -> list[float]:
    """Difference of two means of independent samples, [value, low, high] with a 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    means = ([values[rng.integers(len(values), size=len(values))].mean() for _ in range(2000)] for values in (long, short))
    draws = np.subtract(*means)
    return [round(float(x), 5) for x in (long.mean() - short.mean(), *np.percentile(draws, [2.5, 97.5]))]


def main() -> None:
    torch.set_num_threads(1)
    measured = {setting: added_mass(setting) for setting in SETTINGS}
    length = {s: np.array(tokens) for s, (tokens, _) in measured.items()}
    mass = {m: {s: np.array(masses[m]) for s, (_, masses) in measured.items()} for m in METHODS}
    first, last = SETTINGS[0], SETTINGS[-1]
    result = {"completions": min(len(n) for n in length.values()), "tokens": {s: round(float(n.mean()), 1) for s, n in length.items()},
              "mass": {m: {s: interval(mass[m][s]) for s in SETTINGS} for m in METHODS},
              "per_token": {m: {s: interval(mass[m][s] / length[s]) for s in SETTINGS} for m in METHODS},
              "mass_growth": {m: growth(mass[m][first], mass[m][last]) for m in METHODS},
              "per_token_growth": {m: growth(mass[m][first] / length[first], mass[m][last] / length[last]) for m in METHODS}}
    lengths = " | ".join(f"{result['tokens'][s]:.0f} tokens" for s in SETTINGS)
    print(f"| added per completion | {lengths} | growth, 95 % interval |\n|---|---|---|---|---|")
    for m in METHODS:
        print(f"| `{m}` | " + " | ".join(f"{result['mass'][m][s][0]:+.2f}" for s in SETTINGS) + f" | {cell(result['mass_growth'][m], 2, '+')} |")
    write_atomically(RESULT, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    exit_cleanly(main)
