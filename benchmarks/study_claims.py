"""The paper's claims that the lab can test, and the rule that decides each.

A claim names a number with its 95 % interval and says on which side of `bound` it should lie.  It *holds* when the whole
interval lies there, *does not hold* when the whole interval lies on the other side, and is *undecided* otherwise, or
*not measured* while its runs are missing (or too few seeds are done for an interval).  A claim about absence ("random
credit brings nothing") cannot be shown by an interval around 0; it holds when the effect is below NOTHING.
"""
import numpy as np

RESAMPLES, MIN_SEEDS = 10000, 4
NOTHING = 0.01        # mean reward: about the spread between two seeds of one method
START, END = "<!-- claims: written by python -m benchmarks.study --report -->", "<!-- end of claims -->"


def interval(values) -> list[float]:
    """[mean, low, high] with a 95 % bootstrap interval; [mean, None, None] for fewer than MIN_SEEDS values."""
    values = np.asarray(values, dtype=float)
    mean = round(float(values.mean()), 5) if len(values) else None
    if len(values) < MIN_SEEDS:
        return [mean, None, None]
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(values[draws].mean(1), [2.5, 97.5])
    return [mean, round(float(low), 5), round(float(high), 5)]


def training(claim, a, b, number="mean_reward", side=">", setting="main", bound=0.0):
    """The paired difference a - b of a number of the runs lies on `side` of `bound`."""
    return {"claim": claim, "source": "training", "setting": setting, "rows": [a, b], "number": number, "side": side, "bound": bound}


def gradient(claim, row, number, side, bound, policy="start"):
    """A number of benchmarks/variance.py lies on `side` of `bound`."""
    return {"claim": claim, "source": "variance", "policy": policy, "rows": [row], "number": number, "side": side, "bound": bound}


CLAIMS = [
    gradient("Uniform credit carries nuisance variance: more than 5 % of GRPO's gradient variance is at fillers", "grpo", "filler_share", ">", 0.05),
    gradient("Variance at a nuisance position goes to zero with its weight: at w = 0.1 under 2 % is left", "filler w=0.1, kept", "filler_ratio", "<", 0.02),
    gradient("... and the total variance falls, other weights kept", "filler w=0.1, kept", "variance_ratio", "<", 1.0),
    gradient("... and when the weights still sum to n", "filler w=0.1, renormalised", "variance_ratio", "<", 1.0),
    gradient("... or the variance per squared signal", "filler w=0.1, renormalised", "noise_ratio", "<", 1.0),
    *[gradient(f"{name} lowers the variance at nuisance positions", row, "filler_ratio", "<", 1.0) for name, row in (("OAR-P", "oar_p"), ("OAR-G", "oar_g"))],
    *[gradient(f"{name} lowers the total gradient variance", row, "variance_ratio", "<", 1.0) for name, row in (("OAR-P", "oar_p"), ("OAR-G", "oar_g"))],
    *[gradient(f"{name} brings a step's gradient closer to GRPO's large-batch gradient", row, "cosine_grpo_gain", ">", 0.0)
      for name, row in (("OAR-P", "oar_p"), ("OAR-G", "oar_g"))],
    gradient("Entropy weighting misallocates: it raises the variance at nuisance positions", "entropy", "filler_ratio", ">", 1.0),
    training("... and learns worse than uniform credit", "entropy", "grpo", side="<"),
    training("Pivotal credit can help at all: the known roles beat GRPO", "roles", "grpo"),
    *[training(f"OAR-P learns faster than {name}", "oar_p", b) for name, b in (
        ("GRPO", "grpo"), ("random credit", "random"), ("entropy", "entropy"), ("the entropy bonus", "entropy_bonus"), ("KTAE", "ktae"), ("OAR-G", "oar_g"))],
    *[training(f"OAR-G learns faster than {name}", "oar_g", b) for name, b in (
        ("GRPO", "grpo"), ("random credit", "random"), ("entropy", "entropy"), ("the entropy bonus", "entropy_bonus"), ("KTAE", "ktae"))],
    training("OAR-P ends with higher sampled accuracy than GRPO", "oar_p", "grpo", "sampled"),
    training("OAR-G ends with higher sampled accuracy than GRPO", "oar_g", "grpo", "sampled"),
    training("OAR-P needs fewer steps to a fixed reward than GRPO", "oar_p", "grpo", "steps_to_target", "<"),
    training("OAR-P is steadier than GRPO: a smaller worst fall of the reward", "oar_p", "grpo", "drawdown", "<"),
    training("OAR-P keeps more entropy than GRPO", "oar_p", "grpo", "entropy_end"),
    training("OAR-G keeps more entropy than GRPO", "oar_g", "grpo", "entropy_end"),
    training(f"Random credit brings nothing (less than {NOTHING} of mean reward)", "random", "grpo", side="<", bound=NOTHING),
    training("OAR-P upside down hurts", "inverted", "grpo", side="<"),
    {"claim": "Additive shaping changes the update scale with length: the entropy bonus adds more mass per completion at 8 instructions than at 4",
     "source": "lengths", "rows": ["entropy_bonus"], "number": "mass_growth", "side": ">", "bound": 0.0},
    {"claim": "... also per token, which is what the loss sees when it averages over a completion's tokens",
     "source": "lengths", "rows": ["entropy_bonus"], "number": "per_token_growth", "side": ">", "bound": 0.0},
    training("Larger thresholds give sparser credit: ESS at 0.9 below 0.1 (oar_tg)", "oar_tg threshold=0.9", "oar_tg threshold=0.1", "ess_ratio", "<"),
    training("... and more mass on the top 10 % (oar_tg)", "oar_tg threshold=0.9", "oar_tg threshold=0.1", "top10_mass", ">"),
    *[training(f"Gate ({method}): both beats boost only, not renormalised", method, f"{method} gate=boost_only, renormalise=False") for method in ("oar_g", "oar_tg")],
    *[training(f"Gate ({method}): boost only, not renormalised, collapses more often", f"{method} gate=boost_only, renormalise=False", method, "collapsed") for method in ("oar_g", "oar_tg")],
    *[training(f"Gate ({method}): suppress only is slower than both", f"{method} gate=suppress_only", method, side="<") for method in ("oar_g", "oar_tg", "oar_p")],
    *[training(f"Gate ({method}): boost only is worse than both", f"{method} gate=boost_only", method, side="<") for method in ("oar_g", "oar_tg", "oar_p")],
    *[training(f"Probe ({method}): answer_mean beats last", method, f"{method} probe=last") for method in ("oar_p", "oar_g")],
    *[training(f"Probe ({method}): last beats answer_joint", f"{method} probe=last", f"{method} probe=answer_joint") for method in ("oar_p", "oar_g")],
    *[training(f"{name}: OAR-P learns faster than GRPO", "oar_p", "grpo", setting=setting) for name, setting in (
        ("A quarter of the parameters", "small"), ("6 instructions", "long6"), ("8 instructions", "long8"), ("Mostly filler, groups of 2", "nuisance"))],
]


def find(claim: dict, summary: dict, variance: dict | None, lengths: dict | None) -> tuple[list | None, str]:
    """([value, low, high], what it rests on) of a claim; (None, "") while it is not measured."""
    if claim["source"] == "training":
        rows = summary["settings"].get(claim["setting"], {}).get("rows", {})
        a, b = (rows.get(name, {"seeds": []}) for name in claim["rows"])
        value = interval([number_of(a, claim["number"], s) - number_of(b, claim["number"], s) for s in a["seeds"] if s in b["seeds"]])
        common = len(set(a["seeds"]) & set(b["seeds"]))
        return (value, f"{common} seeds") if value[1] is not None else (None, "")
    if claim["source"] == "lengths":
        value = (lengths or {}).get(claim["number"], {}).get(claim["rows"][0])
        return (value, f"{lengths['completions']} completions each") if value else (None, "")
    row = (variance or {"policies": {}})["policies"].get(claim["policy"], {}).get(claim["rows"][0])
    return (row[claim["number"]], f"{variance['steps']} steps") if row else (None, "")


def number_of(row: dict, name: str, seed: int) -> float:
    """A number of one run of a row of study.json."""
    return row["per_seed"][name][row["seeds"].index(seed)]


def decide(value: list | None, side: str, bound: float) -> str:
    """The verdict on an interval [value, low, high]."""
    if value is None:
        return "not measured"
    above, below = value[1] > bound, value[2] < bound
    if above or below:
        return "holds" if above == (side == ">") else "does not hold"
    return "undecided"


def judge_all(summary: dict, variance: dict | None, lengths: dict | None) -> list[dict]:
    """Every claim with its figure, what that rests on, and the verdict."""
    judged = []
    for claim in CLAIMS:
        value, basis = find(claim, summary, variance, lengths)
        judged.append({**claim, "value": value, "basis": basis, "verdict": decide(value, claim["side"], claim["bound"])})
    return judged


def figure(claim: dict) -> str:
    """The number and its interval, as the table shows it."""
    if claim["value"] is None:
        return ""
    digits = 1 if claim["number"] == "steps_to_target" else 3
    sign = "+" if claim["source"] == "training" or claim["number"].endswith("gain") else ""
    mean, low, high = claim["value"]
    return f"{mean:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def table(judged: list[dict]) -> str:
    """The README's table."""
    lines = ["| claim | number | figure, 95 % interval | from | verdict |", "|---|---|---|---|---|"]
    for claim in judged:
        what = claim["number"].replace("_", " ") + (f", {' - '.join(f'`{r}`' for r in claim['rows'])}" if claim["source"] == "training" else f", `{claim['rows'][0]}`")
        lines.append(f"| {claim['claim']} | {what} | {figure(claim)} | {claim['basis']} | {claim['verdict']} |")
    return "\n".join(lines)


def put_into(text: str, table_text: str) -> str:
    """A document with what stands between its two markers replaced by the table; unchanged without markers."""
    if START not in text or END not in text:
        return text
    before, rest = text.split(START, 1)
    return f"{before}{START}\n{table_text}\n{END}{rest.split(END, 1)[1]}"
