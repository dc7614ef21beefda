"""The picture every run leaves behind."""
from pathlib import Path


def training_curves(records: list[dict], title: str, path: Path) -> None:
    """Six panels from a run's metrics records: reward, entropy, length, credit concentration, update, time."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [r for r in records if "reward" in r]
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    panels = [
        ("reward and validation accuracy", ["reward", "informative_share"], ["validation_sampled", "validation_greedy"]),
        ("entropy (nats)", ["entropy", "entropy_filler", "entropy_pivotal"], []),
        ("completion length (tokens)", ["length"], []),
        ("credit concentration", ["ess_ratio", "top10_mass", "truncated_share"], []),
        ("gradient norm (before clipping)", ["grad_norm"], []),
    ]
    for axis, (name, lines, dots) in zip(axes.flat, panels):
        for key in lines:
            points = [(r["step"], r[key]) for r in steps if r.get(key) is not None]
            if points:
                axis.plot(*zip(*points), label=key.replace("_", " "), linewidth=1.4)
        for key in dots:
            points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
            if points:
                axis.plot(*zip(*points), "o--", label=key.replace("_", " "), linewidth=0.8, markersize=4)
        axis.set_title(name, fontsize=10)
        if axis.has_data():
            axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=2, frameon=False)
    axis = axes.flat[-1]
    if steps:
        phases = ["rollout", "attribution", "update"]
        axis.stackplot([r["step"] for r in steps], *[[r[f"seconds_{p}"] for r in steps] for p in phases], labels=phases, alpha=0.8)
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=2, frameon=False)
    axis.set_title("seconds per step", fontsize=10)
    for axis in axes.flat:
        axis.set_xlabel("step", fontsize=8, loc="right", labelpad=-2)
        axis.grid(alpha=0.25)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def save(figure, path: Path, dpi: int = 110) -> None:
    """Write a figure as PNG, whole or not at all, and close it."""
    import matplotlib.pyplot as plt
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=dpi)
    plt.close(figure)
    temporary.replace(path)
