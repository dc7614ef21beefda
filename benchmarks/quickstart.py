"""The README's first command for several methods and seeds: accuracy before and after, paired by seed.

    python -m benchmarks.quickstart                                    # 4 methods x 4 seeds, about a minute a run on two cores
    python -m benchmarks.quickstart --methods grpo oar_g --seeds 0 1

Every run is `python train.py --method M --seed S` with the lab's defaults (60 steps of 8 x 8 completions, lr 1e-4).  Runs
that are complete already are not repeated.  Writes benchmarks/results/quickstart.json.  Four seeds show that training
works and how much seeds differ; they do not rank methods.
"""
import argparse
import json
import statistics
import sys
from pathlib import Path

import train
from oar.config import PRESETS
from oar.checkpoint import read_records, write_atomically

RESULT = Path(__file__).parent / "results" / "quickstart.json"
COLUMNS = ("before", "sampled", "greedy", "reward")


def run_one(method: str, seed: int, folder: Path) -> dict[str, float]:
    """Train once (or read a finished run): validation accuracy before and after, mean training reward."""
    records = read_records(folder / "metrics.jsonl")
    if not records or records[-1]["step"] < PRESETS["lab"]["steps"]:
        again = ["--resume", str(folder)] if (folder / "config.json").exists() else ["--method", method, "--seed", str(seed), "--out", str(folder)]
        sys.argv = ["train.py", *again]
        train.main()
        records = read_records(folder / "metrics.jsonl")
    first, last = records[0], records[-1]
    return {"before": first["validation_sampled"], "sampled": last["validation_sampled"], "greedy": last["validation_greedy"],
            "reward": statistics.mean(r["reward"] for r in records[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["grpo", "random", "oar_g", "oar_p"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs/quickstart"), help="where the run folders go")
    args = parser.parse_args()
    results = {method: [run_one(method, seed, args.runs / f"{method}-{seed}") for seed in args.seeds] for method in args.methods}
    write_atomically(RESULT, json.dumps({"seeds": args.seeds, "runs": results}, indent=1) + "\n")
    print(f"\n| method | {' | '.join(('sampled before', 'sampled after', 'greedy after', 'mean training reward'))} |\n|---|---|---|---|---|")
    for method, runs in results.items():
        cells = [[run[column] for run in runs] for column in COLUMNS]
        print(f"| `{method}` | " + " | ".join(f"{statistics.mean(c):.3f} ± {statistics.stdev(c) if len(c) > 1 else 0:.3f}" for c in cells) + " |")
    print(f"mean ± standard deviation over seeds {args.seeds}; 256 validation problems")


if __name__ == "__main__":
    main()
