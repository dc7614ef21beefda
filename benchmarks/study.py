"""The paper's claims on the lab: GRPO against every method, paired by seed, and the ablations.

    python -m benchmarks.study                                         # everything that is not done yet (hours)
    python -m benchmarks.study --shard 0/2 & python -m benchmarks.study --shard 1/2       # the same on two cores
    python -m benchmarks.study --settings main --variants grpo oar_g --seeds 0 1 2 3     # some rows of the table
    python -m benchmarks.study --report                                # tables and figures from whatever is finished
    python -m benchmarks.study --choose main                           # how steps and learning rate were chosen (GRPO alone)

A run trains the warm-start policy on one thread by train.train_step, 16 completions a step, and validates it at the end; it
keeps no checkpoint.  Runs of one seed see the same problems, start from the same policy and use the same uniform numbers to
sample, whatever the method.  benchmarks/study_plan.py says what is run and how the setting was chosen.

Every finished run is one JSON in --out and is not repeated.  --report gathers them in benchmarks/results/study.json.
"""
import argparse
import dataclasses
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

import train
from benchmarks.study_plan import CHOICE_SEEDS, LEARNING_RATES, NOISE, SETTINGS, STEPS_AT_LEAST, VARIANTS, Job, Setting, jobs, shard_of
from oar import lab, models
from oar.checkpoint import write_atomically
from oar.config import Config, apply_preset
from oar.errors import UserError, exit_cleanly
from oar.optimizer import make_optimizer

RUNS = Path("runs/study")
CPU = torch.device("cpu")
CAST = partial(models.autocast, CPU, torch.float32)
CHOICE = Path(__file__).parent / "results" / "study_choice.json"
CURVES = ("reward", "entropy", "entropy_filler", "entropy_pivotal", "ess_ratio", "top10_mass", "grad_norm", "informative_share")


# --------------------------------------------------------------------------------------------------------------------
# one run

def warm_start(setting: Setting, out: Path) -> str:
    """The setting's policy: the lab's own where it fits, else one that is built once and kept under `out`.

    Its folder has the name of the first setting that starts from it.
    """
    if setting[:5] == Setting()[:5]:                 # the five fields that make a policy
        return "lab"
    name = next(name for name, other in SETTINGS.items() if other[:5] == setting[:5])
    folder = out / "warm_starts" / name
    if not folder.exists():
        temporary = folder.with_name(f"{name}.{os.getpid()}.tmp")
        lab.rebuild(temporary, setting.instructions, setting.fillers, setting.sloppiness, setting.warm_steps, setting.hidden, layers=3)
        try:
            temporary.rename(folder)
        except OSError:                              # another process was faster
            shutil.rmtree(temporary)
    return str(folder)


def configure(job: Job, setting: Setting, model: str, **change) -> Config:
    """The run's settings, as train.py would have them."""
    config = Config(model=model, instructions=setting.instructions, steps=setting.steps, prompts_per_step=setting.prompts_per_step,
                    group_size=setting.group_size, max_new_tokens=setting.max_new_tokens, lr=setting.lr, seed=job.seed,
                    **VARIANTS[job.variant], **change)
    apply_preset(config, is_lab=True)
    return config


def silent(what: str) -> None:
    """In place of a bar."""


def train_steps(policy: models.Policy, examples: list, config: Config, steps: int):
    """Train the policy for the first `steps` steps of a run; yields the metrics of each."""
    optimizer = make_optimizer(config.optimizer, policy.model, config.lr, config.weight_decay)
    for step in range(1, steps + 1):
        problems = train.examples_of_step(examples, step, config.prompts_per_step, config.seed)
        yield train.train_step(policy, None, optimizer, problems, config, step, CAST, silent)[0]


def run(job: Job, config: Config) -> dict:
    """Train once and validate: the record of a run, curves (one number per step) included."""
    started = time.process_time()
    policy = models.load(config.model, CPU)
    examples, held_out, _ = train.load_examples(config, policy)
    before = train.validate(policy, config, held_out, CAST, silent) if job.seed in CHOICE_SEEDS[:1] else {}
    curves = {name: [] for name in CURVES}
    for line in train_steps(policy, examples, config, config.steps):
        for name, curve in curves.items():
            curve.append(None if line[name] is None else float(f"{line[name]:.5g}"))
    return {**job._asdict(), "before": before, "after": train.validate(policy, config, held_out, CAST, silent), "curves": curves,
            "config": dataclasses.asdict(config), "commit": commit(), "seconds": round(time.process_time() - started, 1),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}}


def commit() -> str | None:
    """The commit of the code, with a + when files differ from it; None outside a checkout."""
    git = partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60)
    try:
        head = git(["git", "rev-parse", "HEAD"])
        dirty = git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if dirty else "") if head.returncode == 0 else None


def path_of(out: Path, job: Job, lr: float | None = None) -> Path:
    """Where a run's record goes; `lr` is given while choosing it, and those runs are none of the study's."""
    name = f"{job.variant} lr={lr:g}" if lr else job.variant
    return (out / "choice" if lr else out) / job.setting / f"{name.replace(', ', '+').replace(' ', '_')}-{job.seed}.json"


def run_once(out: Path, job: Job, setting: Setting, lr: float | None = None) -> dict:
    """The record of a run, made now unless it is there; written whole or not at all."""
    path = path_of(out, job, lr)
    if path.exists():
        return json.loads(path.read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    chosen = setting if lr is None else setting._replace(lr=lr)
    record = run(job, configure(job, chosen, warm_start(setting, out)))
    write_atomically(path, json.dumps(record) + "\n")
    return record


# --------------------------------------------------------------------------------------------------------------------
# choosing the setting by GRPO alone

def thirds(curve: list[float], steps: int) -> list[float]:
    """Mean of the first, middle and last third of the first `steps` values."""
    cut = [0, steps // 3, 2 * steps // 3, steps]
    return [statistics.mean(curve[a:b]) for a, b in zip(cut, cut[1:])]


def judge(curves: list[list[float]], steps: int) -> dict:
    """The rule of study_plan.py at one number of steps: reward curves, one per seed -> what it looks at, and its verdict."""
    parts = [thirds(curve, steps) for curve in curves]
    steady = sum(c >= a + 0.1 and b >= a - NOISE and c >= b - NOISE for a, b, c in parts)
    first, middle, last = (statistics.mean(column) for column in zip(*parts))
    return {"steps": steps, "mean": statistics.mean(statistics.mean(curve[:steps]) for curve in curves), "thirds": [first, middle, last],
            "steady_seeds": steady, "qualifies": steady == len(curves) and 0.3 <= last <= 0.95}


def choose(name: str, out: Path, shard: int, shards: int, seeds: list[int] | None = None, rates: list[float] | None = None) -> None:
    """Run GRPO on the seeds set aside (or those given) and apply the rule; writes an entry of study_choice.json.

    The setting's own entry is that of its own seeds and learning rates; one for others says so in its name.
    """
    setting, tables = SETTINGS[name], {}
    entry_name = name + (f", lr {' '.join(f'{lr:g}' for lr in rates)}" if rates else "") + (f", seeds {min(seeds)} to {max(seeds)}" if seeds else "")
    seeds = seeds or list(CHOICE_SEEDS)
    rates = rates or (list(LEARNING_RATES) if name == "main" else [setting.lr])
    records = {(lr, seed): run_once(out, Job(name, "grpo", seed), setting, lr)
               for lr in rates for seed in seeds if (seed + rates.index(lr)) % shards == shard}
    if shards > 1:
        return print(f"shard {shard} of {shards} is done; the same command without --shard prints the table")
    lengths = range(setting.steps, STEPS_AT_LEAST - 1, -20)
    for lr in rates:
        curves = [records[lr, seed]["curves"]["reward"] for seed in seeds]
        tables[f"{lr:g}"] = [judge(curves, steps) for steps in lengths]
    entry = {"before": records[rates[0], seeds[0]]["before"], "seeds": seeds, "rates": tables, "chosen": None}
    for at, steps in enumerate(lengths):
        fit = {lr: rows[at] for lr, rows in tables.items() if rows[at]["qualifies"]}
        if fit:
            best = max(fit, key=lambda lr: fit[lr]["mean"])
            entry["chosen"] = {"steps": steps, "lr": float(best), "target": round(20 * fit[best]["thirds"][1]) / 20}
            break
    print(f"{entry_name}: before {entry['before']}\n| lr | steps | mean reward | thirds | steady seeds | qualifies |\n|---|---|---|---|---|---|")
    for lr, rows in tables.items():
        for row in rows:
            print(f"| {lr} | {row['steps']} | {row['mean']:.3f} | {' '.join(f'{x:.2f}' for x in row['thirds'])} | "
                  f"{row['steady_seeds']} of {len(seeds)} | {'yes' if row['qualifies'] else 'no'} |")
    print("chosen:", entry["chosen"])
    known = json.loads(CHOICE.read_text()) if CHOICE.exists() else {}
    write_atomically(CHOICE, json.dumps(known | {entry_name: entry}, indent=1) + "\n")


# --------------------------------------------------------------------------------------------------------------------
# the command

def parse_shard(text: str) -> tuple[int, int]:
    """"0/2" -> (0, 2). UserError for anything that is not a part of a whole."""
    left, _, right = text.partition("/")
    if not (left.isdecimal() and right.isdecimal() and int(left) < int(right)):
        raise UserError(f"--shard must look like 0/2 or 1/2, got {text!r}")
    return int(left), int(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=[], help=f"of {', '.join(SETTINGS)} (default: all)")
    parser.add_argument("--variants", nargs="+", default=[], help="variant names or patterns, e.g. oar_g 'oar_tg threshold*' (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, help="instead of the setting's own (with --choose: of those set aside)")
    parser.add_argument("--rates", nargs="+", type=float, help="with --choose: learning rates to try, instead of the setting's own")
    parser.add_argument("--shard", default="0/1", help="K/N: do the K-th of N parts, one process each")
    parser.add_argument("--out", type=Path, default=RUNS, help="folder of the runs")
    parser.add_argument("--choose", metavar="SETTING", help="choose steps and learning rate by GRPO alone, and stop")
    parser.add_argument("--report", action="store_true", help="tables, claims and figures from the finished runs, and stop")
    args = parser.parse_args()
    if args.rates and not args.choose:
        raise UserError("--rates goes with --choose only: the study's runs take their setting's learning rate")
    torch.set_num_threads(1)
    shard, shards = parse_shard(args.shard)
    if args.choose:
        jobs([args.choose], [], None)                # complains about an unknown name
        return choose(args.choose, args.out, shard, shards, args.seeds, args.rates)
    if args.report:
        from benchmarks import study_report
        return study_report.main(args.out)
    plan = jobs(args.settings, args.variants, args.seeds)
    mine = [job for job in plan if shard_of(job, shards) == shard]
    todo = [job for job in mine if not path_of(args.out, job).exists()]
    tqdm.write(f"{len(plan)} runs selected, {len(mine)} in this shard, {len(mine) - len(todo)} of them finished already")
    failed = 0
    for job in tqdm(todo, unit="run"):
        try:
            record = run_once(args.out, job, SETTINGS[job.setting])
        except RuntimeError as error:                # one bad run must not end a night of them
            failed += 1
            tqdm.write(f"failed: {job.setting}, {job.variant}, seed {job.seed}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        tqdm.write(f"{job.setting}  {job.variant:<28} seed {job.seed:<3} mean reward {statistics.mean(record['curves']['reward']):.3f}, "
                   f"sampled {record['after']['validation_sampled']:.3f}, {record['seconds']:.0f} s")
    if failed:
        raise UserError(f"{failed} of {len(todo)} runs failed; the same command tries them again")


if __name__ == "__main__":
    exit_cleanly(main)
