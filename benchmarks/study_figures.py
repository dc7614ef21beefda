"""Figures of the study: curves with bands, and differences to GRPO with intervals."""
from pathlib import Path

import numpy as np

from oar import plots

COLOURS = {"grpo": "black", "random": "0.6", "entropy": "tab:brown", "entropy_bonus": "tab:pink", "ktae": "tab:olive", "oar_g": "tab:orange",
           "oar_f": "tab:purple", "oar_p": "tab:blue", "oar_t": "tab:red", "oar_tg": "tab:green", "roles": "tab:cyan", "inverted": "0.35"}
PANELS = (("reward", ("grpo", "oar_p", "oar_g", "oar_tg", "roles"), "reward: outcome-grounded credit"),
          ("reward", ("grpo", "random", "entropy", "entropy_bonus", "ktae", "inverted"), "reward: other credit"),
          ("entropy_filler", tuple(COLOURS), "entropy on fillers (nats)"),
          ("entropy_pivotal", tuple(COLOURS), "entropy on digits (nats)"))
PER_LINE = 4             # settings beside each other


def plot_bands(axis, curves: dict, number: str, variants) -> None:
    """Mean of a smoothed curve over seeds, with a band of 1.96 standard errors; one line per variant that is there."""
    for name in variants:
        if name not in curves:
            continue
        mean, low, high = (np.array(curves[name][number][k], dtype=float) for k in ("mean", "low", "high"))
        steps = 2 * np.arange(1, len(mean) + 1)
        axis.plot(steps, mean, color=COLOURS[name], label=name, linewidth=2 if name == "grpo" else 1.3, linestyle="--" if name == "inverted" else "-")
        axis.fill_between(steps, low, high, color=COLOURS[name], alpha=0.12, linewidth=0)
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)


def plot_differences(axis, rows: dict, number: str, key: str = "to_grpo") -> None:
    """One paired difference with its interval per variant, best on top; a remark where no variant has an interval."""
    shown = {v: r[key][number] for v, r in rows.items() if key in r and r[key][number][1] is not None}
    for height, (name, (mean, low, high)) in enumerate(sorted(shown.items(), key=lambda item: item[1][0])):
        axis.plot([low, high], [height, height], color=COLOURS.get(name.split(" ")[0], "black"), linewidth=2)
        axis.plot(mean, height, "o", color=COLOURS.get(name.split(" ")[0], "black"), markersize=5)
    axis.set_yticks(range(len(shown)), [n for n, _ in sorted(shown.items(), key=lambda item: item[1][0])], fontsize=8)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.locator_params(axis="x", nbins=5)
    axis.grid(alpha=0.25, axis="x")
    if not shown:
        axis.text(0.5, 0.5, "too few seeds\nfor an interval", transform=axis.transAxes, ha="center", va="center", fontsize=9)


def differences_by_setting(settings: dict):
    """A figure with one panel per setting: every method's difference to GRPO in mean reward."""
    import matplotlib.pyplot as plt
    lines = -(-len(settings) // PER_LINE)
    figure, axes = plt.subplots(lines, min(PER_LINE, len(settings)), figsize=(15, 3.8 * lines), constrained_layout=True, squeeze=False)
    for axis in axes.flat[len(settings):]:
        axis.set_visible(False)
    for axis, (name, block) in zip(axes.flat, settings.items()):
        plot_differences(axis, {v: r for v, r in block["rows"].items() if v in COLOURS}, "mean_reward")
        axis.set_title(f"{name} ({len(block['rows'].get('grpo', {'seeds': []})['seeds'])} seeds)", fontsize=10)
        axis.set_xlabel("mean reward minus GRPO's, 95 %", fontsize=8)
    return figure


def curves_of_main(block: dict):
    """A figure of the main setting's curves with bands, one panel for each of PANELS."""
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    for axis, (number, variants, title) in zip(axes.flat, PANELS):
        plot_bands(axis, block["curves"], number, variants)
        axis.set_title(title, fontsize=10)
        if axis.has_data():
            axis.legend(fontsize=7, ncol=2)
    seeds = [len(r["seeds"]) for v, r in block["rows"].items() if v in COLOURS]
    count = " to ".join(map(str, sorted({min(seeds), max(seeds)})))
    figure.suptitle(f"main setting, {count} seeds; band: 1.96 standard errors", fontsize=11)
    return figure


def draw(summary: dict, folder: Path) -> None:
    """study_curves.png (the main setting) and study_settings.png (differences in mean reward, setting by setting)."""
    import matplotlib
    matplotlib.use("Agg")
    folder.mkdir(exist_ok=True)
    settings = summary["settings"]
    if "main" in settings:
        plots.save(curves_of_main(settings["main"]), folder / "study_curves.png")
    plots.save(differences_by_setting(settings), folder / "study_settings.png")
