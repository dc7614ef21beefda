"""Seconds per training step by method, as a ratio to GRPO measured in the same run.

    python -m benchmarks.cost                                          # the lab, about 3 minutes on two cores
    python -m benchmarks.cost --methods grpo oar_g --repeats 9

Every repeat takes the methods in turn on the same problems, from the same policy (so all of them attribute the same
completions), after one warm-up; medians are printed.  Writes benchmarks/results/cost.json.
"""
import argparse
import copy
import json
import statistics
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import train
from oar import data, models
from oar.checkpoint import write_atomically
from oar.config import Config, apply_preset

RESULT = Path(__file__).parent / "results" / "cost.json"
PHASES = ("rollout", "attribution", "update")


def time_step(policy, examples, method: str, repeat: int) -> dict[str, float]:
    """Seconds of each phase of one training step of `method` on a copy of the policy."""
    config = Config(method=method, seed=repeat)
    apply_preset(config, is_lab=True)
    fresh = policy._replace(model=copy.deepcopy(policy.model))
    optimizer = torch.optim.AdamW(fresh.model.parameters(), lr=config.lr)
    cast = partial(models.autocast, torch.device("cpu"), torch.float32)
    line, _ = train.train_step(fresh, None, optimizer, examples, config, 1, cast, lambda what: None)
    return {phase: line[f"seconds_{phase}"] for phase in PHASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["grpo", "entropy", "ktae", "oar_g", "oar_f", "oar_p", "oar_t", "oar_tg"])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    policy, times = models.load("lab", torch.device("cpu")), {method: [] for method in args.methods}
    for repeat in tqdm(range(args.repeats + 1)):                                     # repeat 0 is the warm-up
        examples = data.lab_examples("train", 8, 4, repeat)
        for method in args.methods:
            seconds = time_step(policy, examples, method, repeat)
            if repeat:
                times[method].append(seconds)
    medians = {m: {p: statistics.median(t[p] for t in runs) for p in PHASES} for m, runs in times.items()}
    baseline = statistics.median(sum(t.values()) for t in times[args.methods[0]])
    rows = {m: {"seconds": statistics.median(sum(t.values()) for t in runs), **medians[m]} for m, runs in times.items()}
    print(f"| method | s per step | ratio to {args.methods[0]} | rollout | attribution | update |\n|---|---|---|---|---|---|")
    for method, row in rows.items():
        print(f"| `{method}` | {row['seconds']:.2f} | {row['seconds'] / baseline:.2f} | "
              + " | ".join(f"{row[p]:.2f}" for p in PHASES) + " |")
    print(f"medians of {args.repeats} repeats, {torch.get_num_threads()} threads, torch {torch.__version__}")
    write_atomically(RESULT, json.dumps({"threads": torch.get_num_threads(), "repeats": args.repeats, "seconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
