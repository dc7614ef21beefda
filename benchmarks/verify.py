"""How good and how fast the verifier is: hand-made cases, 900 real graded outputs, hostile texts, plain integers.

    python -m benchmarks.verify                 # reads ../shared beside the checkout; under a minute on two cores
    python -m benchmarks.verify --shared DIR

The truth of a graded output is the audited verdict where there is one, else a person's reading; rows without a
settled truth, or whose gold is suspect, are left out.  math-verify's figures are the verdicts recorded in the same file.
Exit code 1 when a figure misses its target, 2 when the data are not there.
"""
import argparse
import json
import sys
import time
from pathlib import Path

from oar.errors import UserError, exit_cleanly
from oar.verify import is_correct

SHARED = Path(__file__).parents[2] / "shared"
HOSTILE = [
    r"\boxed{9^{9^{9^{9^9}}}}", r"\boxed{(10^8)!}", r"\boxed{\sum_{n=1}^{10^{12}}\frac1n}",
    r"\boxed{10^{10^{10}} \bmod 7}",
    r"\boxed{" + "7" * 1_000_000 + "}", "7" * 1_000_000, r"\boxed{1e999999999}", r"\boxed{5} " * 10_000,
    r"\boxed{" * 30_000, r"\boxed{" + "(" * 900 + "1" + ")" * 900 + "}", r"\boxed{" + r"\sqrt{" * 35 + "2" + "}" * 36,
    r"\boxed{" + r"\frac{1}{1+" * 30 + "x" + "}" * 31, r"\boxed{" + "x+" * 900 + "x}", r"\boxed{" + "|" * 1900 + "}",
    "The answer is " * 20_000, "answer" + " " * 200_000 + "5", "#### \n" * 50_000, "$" * 200_000, "," * 200_000 + ".",
]


def read_jsonl(path: Path) -> list[dict]:
    if not path.is_file():
        raise UserError(f"{path} is not there; name the folder that holds cases/ and data/ with --shared")
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def truth(row: dict) -> bool | None:
    """Whether a graded output is right; None when nobody can say."""
    if row.get("suspect_gold"):
        return None
    verdict = row["audit"]["verdict"] if "audit" in row else row["truth"]
    return None if verdict is None else bool(verdict)


def timed(text: str, gold) -> tuple[bool, float]:
    start = time.perf_counter()
    return is_correct(text, gold), time.perf_counter() - start


def integers_per_second(seconds: float = 1.0) -> float:
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for n in range(100):
            assert is_correct(f"{n} + {count} makes it, so the answer is \\boxed{{{n + count}}}.", str(n + count))
        count += 100
    return count / (time.perf_counter() - start)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=SHARED, help="folder of the data (default: %(default)s)")
    shared = parser.parse_args().shared
    cases = read_jsonl(shared / "cases" / "verify_cases.jsonl")
    graded = [row for row in read_jsonl(shared / "data" / "graded_dev.jsonl") if truth(row) is not None]

    slowest, missed = 0.0, []
    right = {True: [], False: []}                       # by "firm"
    for case in cases:
        verdict, seconds = timed(case["text"], case["gold"])
        slowest = max(slowest, seconds)
        right[case["firm"]].append(verdict == case["right"])
        missed += [] if verdict == case["right"] else [case["id"]]
    outcomes = []                                       # (truth, ours, math-verify's)
    for row in graded:
        verdict, seconds = timed(row["text"], row.get("golds") or row["gold"])
        slowest = max(slowest, seconds)
        outcomes.append((truth(row), verdict, bool(row["mv"])))
        missed += [] if verdict == truth(row) else [row["id"]]
    for text in HOSTILE:
        slowest = max(slowest, timed(text, "42")[1])

    def figures(column: int) -> tuple[float, int, int]:
        wrong = [row for row in outcomes if row[column] != row[0]]
        accepted = sum(row[column] for row in wrong)
        return 1 - len(wrong) / len(outcomes), accepted, len(wrong) - accepted

    ours, theirs, rate = figures(1), figures(2), integers_per_second()
    firm, soft = right[True], right[False]
    rows = [
        ("firm cases right", f"{sum(firm)} of {len(firm)}", "", "all", all(firm)),
        ("convention cases as assumed there", f"{sum(soft)} of {len(soft)}", "", "", True),
        (f"agreement on {len(outcomes)} graded outputs", f"{ours[0]:.2%}", f"{theirs[0]:.2%}", ">= 99.3%",
         ours[0] >= 0.993),
        ("wrong acceptances", ours[1], theirs[1], f"<= {theirs[1]}", ours[1] <= theirs[1]),
        ("wrong rejections", ours[2], theirs[2], "", True),
        (f"slowest text, {len(HOSTILE)} hostile ones included", f"{slowest:.2f} s", "", "<= 6 s", slowest <= 6),
        ("plain integer answers per second", f"{rate:,.0f}", "", ">= 500", rate >= 500),
    ]
    print(f"{'':42}{'oar':>12}{'math-verify':>13}{'target':>10}")
    for name, own, other, target, met in rows:
        print(f"{name:42}{own:>12}{other:>13}{target:>10}{'' if met else '  MISSED'}")
    print("judged otherwise than there:", ", ".join(missed) or "none")
    sys.exit(0 if all(row[-1] for row in rows) else 1)


if __name__ == "__main__":
    exit_cleanly(main)
