"""Tables, paired differences and figures of benchmarks/study.py, from whatever runs are finished.

A row is a variant in a setting.  Its differences are paired by seed: to GRPO, and for an ablation also to its own method
without the change.  Intervals are 95 % bootstrap intervals over seeds; with fewer than study_claims.MIN_SEEDS common
seeds no interval is given and nothing is concluded.
"""
import json
import statistics
from pathlib import Path

import numpy as np

from benchmarks import study_claims
from benchmarks.intervals import cell
from benchmarks.study_claims import interval
from benchmarks.study_plan import METHODS, SETTINGS, VARIANTS
from oar.checkpoint import write_atomically
from oar.errors import UserError

HERE = Path(__file__).parent
RESULT, VARIANCE, LENGTHS = (HERE / "results" / f"{name}.json" for name in ("study", "variance", "length_scale"))
README, DOCS = HERE.parent / "README.md", HERE.parent / "docs"
WINDOW = 10          # steps over which a reward curve is smoothed
BANDS = ("reward", "entropy", "entropy_filler", "entropy_pivotal")                   # curves that are kept, smoothed, every 2nd step
COLUMNS = {             # number of a run -> (heading, digits)
    "mean_reward": ("mean reward", 3), "steps_to_target": ("steps to target", 1), "sampled": ("sampled", 3), "greedy": ("greedy", 3),
    "drawdown": ("worst fall", 3), "entropy_end": ("entropy, end", 3), "filler_end": ("on fillers", 3), "pivotal_end": ("on pivotal", 4),
    "ess_ratio": ("ESS", 2), "top10_mass": ("top 10 %", 2), "grad_norm": ("gradient norm", 3), "collapsed": ("collapsed", 2),
}


# --------------------------------------------------------------------------------------------------------------------
# numbers of a run

def smooth(curve: list) -> np.ndarray:
    """Mean of the last WINDOW values at every step (of fewer at the start); steps without a value (None) are skipped."""
    values = np.array([np.nan if v is None else v for v in curve], dtype=float)
    windows = [values[max(0, i + 1 - WINDOW):i + 1] for i in range(len(values))]
    return np.array([np.nanmean(w) if np.isfinite(w).any() else np.nan for w in windows])


def numbers(record: dict, target: float) -> dict[str, float]:
    """What the tables show of one run.

    steps_to_target: first step at which the smoothed reward reaches `target` (WINDOW steps at least; one more than there
    are when it never does).  drawdown: largest fall of the smoothed reward below its earlier best.  collapsed: 1 when the
    smoothed reward ends below where it began.
    """
    curves, reward = record["curves"], smooth(record["curves"]["reward"])
    settled = reward[WINDOW - 1:]
    reached = np.flatnonzero(settled >= target)
    ends = {"entropy": "entropy", "filler": "entropy_filler", "pivotal": "entropy_pivotal"}
    ends = {f"{name}_end": smooth(curves[curve])[-1] for name, curve in ends.items()}
    means = {name: float(np.mean([v for v in curves[name] if v is not None] or [np.nan])) for name in ("ess_ratio", "top10_mass", "grad_norm")}
    return {"mean_reward": statistics.mean(curves["reward"]),
            "steps_to_target": int(reached[0]) + WINDOW if len(reached) else len(reward) + 1,
            "sampled": record["after"]["validation_sampled"], "greedy": record["after"]["validation_greedy"],
            "drawdown": float((np.maximum.accumulate(settled) - settled).max()), "collapsed": float(settled[-1] < settled[0]),
            **ends, **means}


def paired(row: dict, other: dict) -> dict[str, list[float]] | None:
    """row - other on their common seeds: number -> [mean, low, high], and how many seeds; None without a common one."""
    seeds = [s for s in row if s in other]
    if not seeds:
        return None
    return {"seeds": len(seeds), **{name: interval([row[s][name] - other[s][name] for s in seeds]) for name in COLUMNS}}


# --------------------------------------------------------------------------------------------------------------------
# all runs

def load(out: Path) -> dict[str, dict[str, dict[int, dict]]]:
    """records[setting][variant][seed] of the finished runs, variants in the order of the plan."""
    records = {}
    for setting in SETTINGS:
        for path in sorted((out / setting).glob("*.json")):
            record = json.loads(path.read_text())
            records.setdefault(setting, {}).setdefault(record["variant"], {})[record["seed"]] = record
    order = list(VARIANTS)
    return {setting: {v: dict(sorted(rows[v].items())) for v in sorted(rows, key=order.index)} for setting, rows in records.items()}


def band(records: list[dict], curve: str) -> dict[str, list[float]]:
    """Smoothed curve, every second step: mean over runs, and 1.96 standard errors below and above."""
    lines = np.stack([smooth(r["curves"][curve]) for r in records])[:, 1::2]         # (seeds, steps / 2)
    mean = lines.mean(0)
    half = 1.96 * lines.std(0, ddof=1) / len(lines) ** 0.5 if len(lines) > 1 else 0 * mean
    return {name: [round(float(x), 4) for x in values] for name, values in (("mean", mean), ("low", mean - half), ("high", mean + half))}


def summarise(records: dict) -> dict:
    """Everything the tables, the claims, the figures and the notebook need."""
    settings = {}
    for setting, variants in records.items():
        runs = {v: {seed: numbers(r, SETTINGS[setting].target) for seed, r in rows.items()} for v, rows in variants.items()}
        table = {}
        for variant, row in runs.items():
            per_seed = {name: [round(float(row[s][name]), 5) for s in row] for name in COLUMNS}
            table[variant] = {"seeds": list(row), "per_seed": per_seed, "mean": {name: interval(values) for name, values in per_seed.items()}}
            for name, other in (("to_grpo", "grpo"), ("to_own", variant.split(" ")[0])):
                if other != variant and other in runs and (difference := paired(row, runs[other])):
                    table[variant][name] = difference
        curves = {v: {c: band(list(rows.values()), c) for c in BANDS} for v, rows in variants.items() if v in METHODS}
        settings[setting] = {"setting": SETTINGS[setting]._asdict(), "rows": table, "curves": curves}
    every = [r for variants in records.values() for rows in variants.values() for r in rows.values()]
    return {"runs": len(every), "commits": sorted({r["commit"] or "" for r in every}),
            "versions": [dict(v) for v in sorted({tuple(r["versions"].items()) for r in every})],
            "core_hours": round(sum(r["seconds"] for r in every) / 3600, 2), "settings": settings}


def tables(summary: dict) -> str:
    """Markdown: per setting the methods with their differences to GRPO, and the ablations with those to their own method."""
    lines = [f"{summary['runs']} runs, {summary['core_hours']} core hours; means, and differences paired by seed with 95 % bootstrap intervals"]
    for name, block in summary["settings"].items():
        s = block["setting"]
        title = (f"{name}: {s['instructions']} instructions, {s['fillers']} fillers each, hidden size {s['hidden']}, {s['steps']} steps of "
                 f"{s['prompts_per_step']} x {s['group_size']}, lr {s['lr']:g}, target {s['target']}")
        for part, key, other in (("methods", "to_grpo", "GRPO"), ("ablations", "to_own", "its own method")):
            rows = {v: r for v, r in block["rows"].items() if (v in METHODS) == (part == "methods")}
            if rows:
                lines += ["", f"**{title}; {part}**", "", *two_tables(rows, key, other)]
    return "\n".join(lines)


def two_tables(rows: dict, key: str, other: str) -> list[str]:
    """Lines of a table of means and of one of differences to `other`."""
    paired_columns = [c for c in COLUMNS if c not in ("ess_ratio", "top10_mass", "grad_norm", "collapsed")]
    heads = [COLUMNS[c][0] for c in COLUMNS]
    lines = [f"| | seeds | {' | '.join(heads)} |", f"|---|---|{'---|' * len(heads)}"]
    for variant, row in rows.items():
        means = " | ".join(f"{row['mean'][c][0]:.{digits}f}" for c, (_, digits) in COLUMNS.items())
        lines.append(f"| `{variant}` | {len(row['seeds'])} | {means} |")
    heads = [COLUMNS[c][0] for c in paired_columns]
    lines += ["", f"| minus {other} | seeds | {' | '.join(heads)} |", f"|---|---|{'---|' * len(heads)}"]
    for variant, row in rows.items():
        if key in row:
            differences = " | ".join(cell(row[key][c], COLUMNS[c][1], "+") for c in paired_columns)
            lines.append(f"| `{variant}` | {row[key]['seeds']} | {differences} |")
    return lines


def main(out: Path) -> None:
    """Print the tables; write study.json, study.md, the figures, and the claims table in the README."""
    from benchmarks import study_figures
    records = load(out)
    if not records:
        raise UserError(f"--out {out}: no finished run there (start some with python -m benchmarks.study)")
    summary = summarise(records)
    variance, lengths = (json.loads(path.read_text()) if path.exists() else None for path in (VARIANCE, LENGTHS))
    summary["claims"] = study_claims.judge_all(summary, variance, lengths)
    write_atomically(RESULT, json.dumps(summary, separators=(",", ":")) + "\n")
    text, claims = tables(summary), study_claims.table(summary["claims"])
    write_atomically(RESULT.with_suffix(".md"), f"# The study's tables\n\nWritten by `python -m benchmarks.study --report`.\n\n{text}\n\n{claims}\n")
    print(f"{text}\n\n{claims}")
    write_atomically(README, study_claims.put_into(README.read_text(encoding="utf-8"), claims))
    study_figures.draw(summary, DOCS)
