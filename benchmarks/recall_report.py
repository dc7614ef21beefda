"""Means, bootstrap intervals, paired claims, tables and the picture of benchmarks/recall.py."""
from pathlib import Path

import numpy as np

from benchmarks.intervals import cell
from oar import plots

RESAMPLES = 2000
MAIN_PROBE = "answer_mean"
PLAIN = ("random", "position", "entropy", "ktae")
CLAIMS = [      # (what is claimed, the ranking that should win, the one that should lose); each is read at one K
    ("OAR-P beats random", "oar_p | answer_mean", "random"),
    ("OAR-P beats entropy", "oar_p | answer_mean", "entropy"),
    ("OAR-P beats KTAE", "oar_p | answer_mean", "ktae"),
    ("OAR-P beats OAR-G", "oar_p | answer_mean", "oar_g | answer_mean"),
    ("random beats entropy", "random", "entropy"),
    ("OAR-P: answer_mean beats last", "oar_p | answer_mean", "oar_p | last"),
    ("OAR-P: answer_mean beats answer_joint", "oar_p | answer_mean", "oar_p | answer_joint"),
    ("OAR-P: the policy's other token beats the mask", "oar_p, other | answer_mean", "oar_p | answer_mean"),
    ("oar_t beats OAR-P (mask)", "oar_t | answer_mean", "oar_p | answer_mean"),
    ("oar_t beats OAR-P (same edit)", "oar_t | answer_mean", "oar_p, other | answer_mean"),
    ("oar_tg beats OAR-G", "oar_tg | answer_mean", "oar_g | answer_mean"),
    ("oar_tg beats OAR-P", "oar_tg | answer_mean", "oar_p | answer_mean"),
]
CLAIM_AT = 30


def interval(values: np.ndarray) -> list[list[float]]:
    """Mean and 95 % bootstrap interval of each column: (n, K) -> K times [mean, low, high]."""
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    means = np.stack([values[draw].mean(0) for draw in draws])                       # (RESAMPLES, K)
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return np.stack([values.mean(0), low, high], 1).round(3).tolist()


def summarise(records: list[dict], top: tuple[int, ...]) -> dict:
    """The table: recall[truth][ranking] = per K [mean, low, high], and the paired claims at K = 30."""
    truths = list(dict.fromkeys(truth for r in records for truth in r["recall"]))
    recall, claims, counts = {}, {}, {}
    for truth in truths:
        rows = [r["recall"][truth] for r in records if truth in r["recall"]]
        table = {name: np.array([row[name] for row in rows]) for name in rows[0]}     # (n, K) each
        recall[truth] = {name: interval(values) for name, values in table.items()}
        at = top.index(CLAIM_AT)
        claims[truth] = {claim: interval((table[a] - table[b])[:, at:at + 1])[0] for claim, a, b in CLAIMS if a in table and b in table}
        counts[truth] = {"completions": len(rows), "causal tokens": round(float(np.mean([r["causal"][truth] for r in records])), 2)}
    return {"completions": len(records), "reasoning tokens": round(float(np.mean([r["tokens"] for r in records])), 1),
            "truths": counts, "recall": recall, "claims": claims}


def show(summary: dict, top: tuple[int, ...], say) -> None:
    """Markdown tables: every ranking by K, the probes side by side, the claims."""
    say(f"{summary['completions']} correct completions of {summary['reasoning tokens']:.0f} reasoning tokens on average")
    for truth, table in summary["recall"].items():
        count = summary["truths"][truth]
        say(f"\nrecall against {truth} ({count['completions']} completions with causal tokens, {count['causal tokens']:.1f} on average), "
            f"probe {MAIN_PROBE}\n\n| top | {' | '.join(f'{k} %' for k in top)} |\n|---|{'---|' * len(top)}")
        for name, cells in table.items():
            if " | " not in name or name.endswith(MAIN_PROBE):
                say(f"| {name.split(' | ')[0]} | " + " | ".join(cell(c, 2) for c in cells) + " |")
    probes = list(dict.fromkeys(n.split(" | ")[1] for n in next(iter(summary["recall"].values())) if " | " in n))
    at = top.index(CLAIM_AT)
    say(f"\nprobes, recall in the top {CLAIM_AT} %\n\n| | " + " | ".join(f"{t}: {p}" for t in summary["recall"] for p in probes) + " |\n|---|"
        + "---|" * len(probes) * len(summary["recall"]))
    names = dict.fromkeys(n.split(" | ")[0] for n in next(iter(summary["recall"].values())) if " | " in n)
    for name in names:
        if all(f"{name} | {p}" in table for table in summary["recall"].values() for p in probes):
            cells = [table[f"{name} | {p}"][at] for table in summary["recall"].values() for p in probes]
            say(f"| {name} | " + " | ".join(cell(c, 2) for c in cells) + " |")
    say(f"\npaired differences of recall in the top {CLAIM_AT} %\n\n| claim | " + " | ".join(summary["claims"]) + " |\n|---|" + "---|" * len(summary["claims"]))
    for claim in next(iter(summary["claims"].values())):
        cells = [summary["claims"][truth][claim] for truth in summary["claims"]]
        say(f"| {claim} | " + " | ".join(f"{verdict(c)} {cell(c, 2, '+')}" for c in cells) + " |")


def verdict(value: list[float]) -> str:
    return "yes" if value[1] > 0 else "no" if value[2] < 0 else "open"


def picture(summary: dict, top: tuple[int, ...], path: Path) -> None:
    """One panel per truth: recall against K, with intervals as bands."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    colours = dict(zip(("random", "position", "entropy", "ktae", "oar_p", "oar_g", "oar_f", "oar_t", "oar_tg"),
                       ("0.55", "0.75", "tab:brown", "tab:olive", "tab:blue", "tab:orange", "tab:purple", "tab:red", "tab:green")))
    figure, axes = plt.subplots(1, len(summary["recall"]), figsize=(4.6 * len(summary["recall"]), 4.4), sharey=True, constrained_layout=True)
    for axis, (truth, table) in zip(np.atleast_1d(axes), summary["recall"].items()):
        for name, colour in colours.items():
            mean, low, high = np.array(table[name if name in table else f"{name} | {MAIN_PROBE}"]).T
            axis.plot(top, mean, color=colour, label=name, linewidth=2 if name.startswith("oar") else 1.2, marker="o", markersize=3)
            axis.fill_between(top, low, high, color=colour, alpha=0.12, linewidth=0)
        axis.plot(top, [value[0] for value in table["ceiling"]], color="black", linestyle=":", linewidth=1, label="ceiling")
        axis.set_title({"roles": "roles known by construction", "answer": "oracle: later reasoning kept", "all": "oracle: all decoded again"}[truth], fontsize=10)
        axis.set_xlabel("top K % of the reasoning tokens")
        axis.grid(alpha=0.25)
    np.atleast_1d(axes)[0].set_ylabel("recall of causal tokens")
    np.atleast_1d(axes)[0].legend(fontsize=8)
    figure.suptitle(f"{summary['completions']} correct completions, {summary['setting']['model']}, probe {MAIN_PROBE}", fontsize=10)
    plots.save(figure, path)
