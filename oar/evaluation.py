"""What a table of results is made of: each figure and each interval is defined here, once.

1. P@1 of a problem is the share of its n completions that are right; of a benchmark, the mean over its problems.
2. Its 95 % interval is Wilson's score interval with an effective number of trials (`rate_interval`).  With one completion
   per problem that is the plain Wilson interval; with several, the problems' own spread says how many independent trials
   they amount to.  It never has zero width: 0 of 10 gives [0, 0.28].  In simulations it holds the truth 92 to 97 times in a
   hundred from 10 problems on, 80 to 95 times with fewer: read it as optimistic there.
3. pass@k is the unbiased estimate from n samples (metrics.pass_at_k), again a mean over problems.
4. "overall" is the mean of the benchmarks, each counting the same, as papers report it; its interval is the benchmarks'
   intervals added in squares (`mean_interval`).
5. Two models are compared problem by problem: the mean difference of P@1 over the problems that both were asked, with
   the 95 % percentile interval of a bootstrap that draws problems, within each benchmark (`paired_difference`).
"""
import math
from statistics import NormalDist, fmean, variance

import numpy as np

from oar.metrics import pass_at_k

Z = NormalDist().inv_cdf(0.975)     # 1.96
BOOTSTRAP_DRAWS = 4000
OVERALL = "overall"


# --------------------------------------------------------------------------------------------------------------------
# intervals

def wilson(share: float, trials: float) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share among `trials` independent trials (need not be whole); within [0, 1]."""
    centre = share + Z ** 2 / (2 * trials)
    reach = Z * math.sqrt(share * (1 - share) / trials + Z ** 2 / (4 * trials ** 2))
    scale = 1 + Z ** 2 / trials
    return max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)


def rate_interval(rates: list[float], samples: int) -> tuple[float, float]:
    """95 % interval of P@1 from the rate of each problem, each the mean of `samples` verdicts.

    Wilson's interval with as many trials as give the observed variance of the mean, p (1 - p) / trials = s^2 / problems.
    There are at least as many as problems and at most as many as completions; where every rate is 0, or every rate is 1,
    the spread says nothing and only the problems count.
    """
    problems, share = len(rates), fmean(rates)
    trials = problems
    if problems > 1 and 0 < share < 1:
        spread = variance(rates) / problems
        most = problems * samples
        trials = min(max(share * (1 - share) / spread, problems), most) if spread else most
    return wilson(share, trials)


def mean_interval(shares: list[float], intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """Interval of the mean of independent shares: their distances to the limits, added in squares (MOVER)."""
    share = fmean(shares)
    below = math.sqrt(sum((s - low) ** 2 for s, (low, _) in zip(shares, intervals))) / len(shares)
    above = math.sqrt(sum((high - s) ** 2 for s, (_, high) in zip(shares, intervals))) / len(shares)
    return max(0.0, share - below), min(1.0, share + above)


def paired_difference(groups: list[list[float]], seed: int) -> tuple[float, tuple[float, float]]:
    """Mean difference and its 95 % bootstrap interval; one list of per-problem differences for each benchmark.

    The mean of several benchmarks is the mean of their means.  Problems are drawn with replacement within each.
    """
    rng, arrays = np.random.default_rng(seed), [np.asarray(group) for group in groups]
    means = [np.mean([a[rng.integers(0, len(a), len(a))].mean() for a in arrays]) for _ in range(BOOTSTRAP_DRAWS)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(np.mean([a.mean() for a in arrays])), (float(low), float(high))


# --------------------------------------------------------------------------------------------------------------------
# from completions to rows of the table

def problem_rates(records: list[dict]) -> dict[str, float]:
    """P@1 of each problem, by id, from completion records ("id", "correct")."""
    verdicts: dict[str, list[bool]] = {}
    for record in records:
        verdicts.setdefault(record["id"], []).append(record["correct"])
    return {problem: fmean(right) for problem, right in verdicts.items()}


def benchmark_row(records: list[dict], samples: int, ks: list[int]) -> dict:
    """The figures of one model on one benchmark; `records` holds `samples` completions of each problem."""
    rates = problem_rates(records)
    right = [round(rate * samples) for rate in rates.values()]
    return {
        "problems": len(rates), "samples": samples, "p1": fmean(rates.values()),
        "p1_interval": rate_interval(list(rates.values()), samples),
        "pass_at": {str(k): fmean(pass_at_k(samples, c, k) for c in right) for k in ks},
        "length": fmean(r["tokens"] for r in records), "truncated": fmean(not r["finished"] for r in records),
        "no_answer": fmean(r["answer"] is None for r in records),
    }


def overall_row(rows: list[dict]) -> dict:
    """The mean of the benchmarks' rows; problems (and problems left out) are added up."""
    mean = {name: fmean(row[name] for row in rows) for name in ("p1", "length", "truncated", "no_answer")}
    total = {name: sum(row[name] for row in rows) for name in ("problems", "skipped")}
    interval = mean_interval([row["p1"] for row in rows], [row["p1_interval"] for row in rows])
    pass_at = {k: fmean(row["pass_at"][k] for row in rows) for k in rows[0]["pass_at"]}
    return {**rows[0], **mean, **total, "benchmark": OVERALL, "p1_interval": interval, "pass_at": pass_at}


def compare(first: dict[str, dict[str, float]], other: dict[str, dict[str, float]], seed: int) -> list[dict]:
    """Rows that compare a model with the first one; both arguments give rates by benchmark and problem id.

    Every figure is over the problems that both have rates for; `better` and `worse` count those on which the other
    model's rate is higher and lower.  Empty when there are none.
    """
    pairs = {name: [(rate, other[name][p]) for p, rate in rates.items() if p in other[name]] for name, rates in first.items()}
    pairs = {name: both for name, both in pairs.items() if both}
    result = []
    for name, parts in [(name, [both]) for name, both in pairs.items()] + [(OVERALL, list(pairs.values()))] * bool(pairs):
        groups = [[b - a for a, b in part] for part in parts]
        difference, interval = paired_difference(groups, seed)
        result.append({"benchmark": name, "problems": sum(map(len, parts)),
                       "first_p1": fmean(fmean(a for a, _ in part) for part in parts),
                       "p1": fmean(fmean(b for _, b in part) for part in parts), "difference": difference, "interval": interval,
                       "better": sum(d > 0 for g in groups for d in g), "worse": sum(d < 0 for g in groups for d in g)})
    return result


def confusion(verdicts: list[dict]) -> dict:
    """Accuracy of graded lines ("correct", "answer", and "label" where known) and agreement with the labels."""
    right = fmean(v["correct"] for v in verdicts)
    pairs = [(v["correct"], v["label"]) for v in verdicts if v["label"] is not None]
    counts = {"both_right": (True, True), "only_verdict": (True, False), "only_label": (False, True), "both_wrong": (False, False)}
    return {"lines": len(verdicts), "accuracy": right, "interval": wilson(right, len(verdicts)),
            "no_answer": fmean(v["answer"] is None for v in verdicts), "labelled": len(pairs),
            **{name: pairs.count(pair) for name, pair in counts.items()},
            "agreement": fmean(a == b for a, b in pairs) if pairs else None}


# --------------------------------------------------------------------------------------------------------------------
# tables

def printable(text: str) -> str:
    """Text that is safe to show: control characters (which move cursors and colour terminals) become escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns line up in a terminal too: names to the left, figures to the right."""
    cells = [[printable(cell).replace("|", "\\|") for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    to_left = [name in ("model", "benchmark") for name in header]
    lines = ["| " + " | ".join(c.ljust(w) if left else c.rjust(w) for c, w, left in zip(row, widths, to_left)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (w + 2) if left else "-" * (w + 1) + ":" for w, left in zip(widths, to_left)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def percent_interval(interval: tuple[float, float], sign: str = "") -> str:
    return "[" + ", ".join(f"{100 * limit:{sign}.1f}" for limit in interval) + "]"


def short(name: str, width: int = 44) -> str:
    """The end of a long name, which tells paths apart better than their beginning."""
    return name if len(name) <= width else "..." + name[3 - width:]


def results_table(rows: list[dict]) -> str:
    """One line per model and benchmark; the overall line of a model only where there are several benchmarks."""
    models, ks = {row["model"] for row in rows}, [k for k in rows[0]["pass_at"] if k != "1"]
    alone = {m for m in models if sum(row["model"] == m for row in rows) == 2}
    header = ["benchmark", "problems", "P@1 %", "95 % interval", *[f"pass@{k} %" for k in ks], "tokens", "truncated %", "no answer %"]
    several, skipped = len(models) > 1, any(row["skipped"] for row in rows)
    header = (["model"] if several else []) + header + (["left out"] if skipped else [])
    lines = [[short(row["model"])] * several
             + [row["benchmark"], str(row["problems"]), percent(row["p1"]), percent_interval(row["p1_interval"])]
             + [percent(row["pass_at"][k]) for k in ks]
             + [f"{row['length']:.1f}", percent(row["truncated"]), percent(row["no_answer"])] + [str(row["skipped"])] * skipped
             for row in rows if row["benchmark"] != OVERALL or row["model"] not in alone]
    return table(header, lines)


def comparison_table(rows: list[dict]) -> str:
    """Each other model against the first: P@1 side by side and the paired difference in points."""
    alone = len({row["benchmark"] for row in rows}) == 2
    header = ["model", "benchmark", "problems", "first P@1 %", "P@1 %", "difference", "95 % interval", "better", "worse"]
    return table(header, [[short(row["model"]), row["benchmark"], str(row["problems"]), percent(row["first_p1"]), percent(row["p1"]),
                           f"{100 * row['difference']:+.1f}", percent_interval(row["interval"], "+"), str(row["better"]),
                           str(row["worse"])] for row in rows if row["benchmark"] != OVERALL or not alone])


def confusion_table(rows: list[dict]) -> str:
    """Accuracy per benchmark and, where labels exist, how verdict and label agree."""
    labelled = any(row["labelled"] for row in rows)
    header = ["benchmark", "lines", "right %", "95 % interval", "no answer %"]
    header += ["labelled", "both right", "only verdict", "only label", "both wrong", "agreement %"] if labelled else []
    lines = []
    for row in rows:
        line = [row["benchmark"][:40], str(row["lines"]), percent(row["accuracy"]), percent_interval(row["interval"]),
                percent(row["no_answer"])]
        if labelled:
            line += [str(row[name]) for name in ("labelled", "both_right", "only_verdict", "only_label", "both_wrong")]
            line += ["-" if row["agreement"] is None else percent(row["agreement"])]
        lines.append(line)
    return table(header, lines)
