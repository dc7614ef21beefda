"""The paper's claims that the lab can test, and the rule that decides each.

A claim consists of parts.  A part names a number with its 95 % interval and says on which side of `bound` it should lie: it
*holds* when the whole interval lies there, *does not hold* when the whole interval lies on the other side, is *undecided*
otherwise, and *not measured* while its runs are missing (or too few seeds are done for an interval).  A claim holds when all
its parts do, and does not hold when one of them does not.  Absence ("random credit brings nothing") cannot be shown by an
interval around 0: it holds when the effect is below NOTHING.
"""
import numpy as np

from benchmarks.intervals import cell

RESAMPLES, MIN_SEEDS = 10000, 8
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


def training(a: str, b: str = "grpo", number: str = "mean_reward", side: str = ">", setting: str = "main", bound: float = 0.0) -> dict:
    """The paired difference a - b of a number of the runs lies on `side` of `bound`."""
    return {"source": "training", "setting": setting, "rows": [a, b], "number": number, "side": side, "bound": bound}


def gradient(row: str, number: str, side: str, bound: float, policy: str = "start") -> dict:
    """A number of benchmarks/variance.py lies on `side` of `bound`."""
    return {"source": "variance", "policy": policy, "rows": [row], "number": number, "side": side, "bound": bound}


def length(row: str, number: str) -> dict:
    """A number of benchmarks/length_scale.py is above 0."""
    return {"source": "length_scale", "rows": [row], "number": number, "side": ">", "bound": 0.0}


PAPER, BASELINES, GATED = ("oar_p", "oar_g"), ("random", "entropy", "entropy_bonus", "ktae"), ("oar_p", "oar_g", "oar_tg")
CLAIMS = {
    "Uniform credit carries nuisance variance: over 5 % of GRPO's gradient variance sits at fillers":
        [gradient("grpo", "filler_share", ">", 0.05)],
    "Variance at a nuisance position goes to zero with its weight (A.1.4): under 2 % is left at w = 0.1":
        [gradient("filler w=0.1, kept", "filler_ratio", "<", 0.02)],
    "... then the total gradient variance falls, other weights kept": [gradient("filler w=0.1, kept", "variance_ratio", "<", 1.0)],
    "... and when the weights sum to n": [gradient("filler w=0.1, renormalised", "variance_ratio", "<", 1.0)],
    "... and a step agrees better with the large-batch gradient":
        [gradient("filler w=0.1, renormalised", "cosine_grpo_gain", ">", 0.0)],
    "OAR lowers the variance at nuisance positions": [gradient(m, "filler_ratio", "<", 1.0) for m in PAPER],
    "OAR lowers the total gradient variance": [gradient(m, "variance_ratio", "<", 1.0) for m in PAPER],
    "OAR brings a step closer to the large-batch gradient": [gradient(m, "cosine_grpo_gain", ">", 0.0) for m in PAPER],
    "Entropy weighting misallocates: more variance at fillers, slower learning":
        [gradient("entropy", "filler_ratio", ">", 1.0), training("entropy", side="<")],
    "Credit on the pivotal tokens helps at all (the known roles against GRPO)": [training("roles"), training("roles", number="sampled")],
    "OAR-P learns faster than GRPO": [training("oar_p")],
    "OAR-G learns faster than GRPO": [training("oar_g")],
    "OAR-P learns faster than the other credit": [training("oar_p", b) for b in BASELINES],
    "OAR-G learns faster than the other credit": [training("oar_g", b) for b in BASELINES],
    "OAR-P learns at least as fast as OAR-G": [training("oar_p", "oar_g", bound=-NOTHING)],
    "OAR ends with higher sampled accuracy than GRPO": [training(m, number="sampled") for m in PAPER],
    "OAR needs fewer steps to a fixed reward": [training(m, number="steps_to_target", side="<") for m in PAPER],
    "OAR is steadier: a smaller worst fall of the reward": [training(m, number="drawdown", side="<") for m in PAPER],
    "OAR avoids entropy collapse: more entropy left than under GRPO": [training(m, number="entropy_end") for m in PAPER],
    f"Random credit brings nothing (less than {NOTHING} of mean reward)": [training("random", side="<", bound=NOTHING)],
    "OAR-P's scores carry signal: upside down they hurt": [training("inverted", side="<")],
    "Additive shaping changes the update scale with length (A.1.2): the mass added per completion grows":
        [length("entropy_bonus", "mass_growth")],
    "... also per token, as a loss averaged over the completion sees it": [length("entropy_bonus", "per_token_growth")],
    "Larger thresholds give sparser credit (0.9 against 0.1)": [training("oar_tg threshold=0.9", "oar_tg threshold=0.1", "ess_ratio", "<"),
                                                               training("oar_tg threshold=0.9", "oar_tg threshold=0.1", "top10_mass")],
    "Boost only is worse than the balanced gate": [training(f"{m} gate=boost_only", m, side="<") for m in GATED],
    "Boost only without renormalising collapses more often":
        [training(f"{m} gate=boost_only, renormalise=False", m, "collapsed") for m in GATED[1:]],
    "Suppress only is slower than the balanced gate": [training(f"{m} gate=suppress_only", m, side="<") for m in GATED],
    "Probes: answer_mean beats last": [training(m, f"{m} probe=last") for m in PAPER],
    "Probes: last beats answer_joint": [training(f"{m} probe=last", f"{m} probe=answer_joint") for m in PAPER],
    "OAR's gain over GRPO holds at half the learning rate (what the rule takes on fresh seeds)": [training(m, setting="main_5e-5") for m in PAPER],
    "... at a quarter of the parameters": [training(m, setting="small") for m in PAPER],
    "... on longer chains (6 and 8 instructions)": [training(m, setting=s) for s in ("long6", "long8_5e-5") for m in PAPER],
    "... and where uniform credit should hurt most (mostly filler, groups of 2)": [training(m, setting="nuisance_5e-5") for m in PAPER],
}


def find(part: dict, summary: dict, variance: dict | None, lengths: dict | None) -> tuple[list | None, str]:
    """([value, low, high], what it rests on) of a part; (None, "") while it is not measured."""
    if part["source"] == "training":
        rows = summary["settings"].get(part["setting"], {}).get("rows", {})
        a, b = (rows.get(name, {"seeds": []}) for name in part["rows"])
        seeds = [s for s in a["seeds"] if s in b["seeds"]]
        value = interval([number_of(a, part["number"], s) - number_of(b, part["number"], s) for s in seeds])
        return (value, f"{len(seeds)} seeds") if value[1] is not None else (None, "")
    if part["source"] == "length_scale":
        value = (lengths or {}).get(part["number"], {}).get(part["rows"][0])
        return (value, f"{lengths['completions']} completions each") if value else (None, "")
    row = (variance or {"policies": {}})["policies"].get(part["policy"], {}).get(part["rows"][0])
    return (row[part["number"]], f"{variance['steps']} steps") if row else (None, "")


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


def together(verdicts: list[str]) -> str:
    """The verdict on a claim from those on its parts."""
    for verdict in ("does not hold", "not measured", "undecided"):
        if verdict in verdicts:
            return verdict
    return "holds"


def judge_all(summary: dict, variance: dict | None, lengths: dict | None) -> list[dict]:
    """Every claim with its parts' figures, what they rest on, and the verdicts."""
    judged = []
    for claim, parts in CLAIMS.items():
        measured = []
        for part in parts:
            value, basis = find(part, summary, variance, lengths)
            measured.append({**part, "value": value, "basis": basis, "verdict": decide(value, part["side"], part["bound"])})
        judged.append({"claim": claim, "parts": measured, "verdict": together([p["verdict"] for p in measured])})
    return judged


def figure(part: dict) -> str:
    """A part's number and its interval, as the table shows it."""
    where = f"{part['setting']}, " if part.get("setting", "main") != "main" else ""
    name = f"{where}{part['number'].replace('_', ' ')}, {' - '.join(f'`{r}`' for r in part['rows'])}"
    if part["value"] is None:
        return name
    digits = 1 if part["number"] == "steps_to_target" else 3
    sign = "+" if part["source"] == "training" or part["number"].endswith(("gain", "growth")) else ""
    return f"{name}: {cell(part['value'], digits, sign)}"


def table(judged: list[dict]) -> str:
    """The README's table: one line per claim, its parts below each other."""
    lines = ["| claim | figure, 95 % interval | from | verdict |", "|---|---|---|---|"]
    for claim in judged:
        bases = list(dict.fromkeys(p["basis"] for p in claim["parts"] if p["basis"]))
        lines.append(f"| {claim['claim']} | {'<br>'.join(map(figure, claim['parts']))} | {', '.join(bases)} | {claim['verdict']} |")
    return "\n".join(lines)


def put_into(text: str, table_text: str) -> str:
    """A document with what stands between its two markers replaced by the table; unchanged without markers."""
    if START not in text or END not in text:
        return text
    before, rest = text.split(START, 1)
    return f"{before}{START}\n{table_text}\n{END}{rest.split(END, 1)[1]}"
