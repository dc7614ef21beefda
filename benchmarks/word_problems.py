"""Easy word problems of one step, for models that are too small for GSM8K, with a few worked examples as prompt.

The worked examples make completions short and their final answer easy to find.

    python -m benchmarks.word_problems > words.jsonl                   # 60 of them, for train.py --data words.jsonl
"""
import json
import random

from oar.data import Example

STOPS = ["\n"]      # a solution is one line
SHOTS = """\
Problem: Ann has 5 pears. Ann finds 3 more pears. How many pears does Ann have now?
Solution: Ann had 5 pears and found 3 more, so Ann has 5 + 3 = 8 pears. The answer is 8.

Problem: Eve has 9 coins. Eve gives away 4 coins. How many coins does Eve have left?
Solution: Eve had 9 coins and gave away 4, so Eve has 9 - 4 = 5 coins left. The answer is 5.
"""
NAMES = "Tom Mia Sam Lily Max Zoe Leo Amy".split()
THINGS = "apples pens nuts balls books stamps shells beads".split()


def prompt(problem: str) -> str:
    return f"{SHOTS}\nProblem: {problem}\nSolution:"


def one(rng: random.Random) -> tuple[str, int]:
    """A problem of a random kind and its answer."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return rng.choice([
        (f"{name} has {a} {thing}. {name} finds {b} more {thing}. How many {thing} does {name} have now?", a + b),
        (f"{name} has {a + b} {thing}. {name} gives away {b} {thing}. How many {thing} does {name} have left?", a),
    ])


def examples(count: int, seed: int) -> list[Example]:
    """`count` different problems, or as many as there are (a few thousand)."""
    rng, problems = random.Random(f"word-{seed}"), {}
    for _ in range(20 * count):
        text, answer = one(rng)
        problems[text] = answer
        if len(problems) == count:
            break
    return [Example(text, str(answer), f"word-{i:04d}") for i, (text, answer) in enumerate(problems.items())]


if __name__ == "__main__":
    for example in examples(60, 0):
        print(json.dumps({"problem": example.problem, "answer": example.answer, "id": example.id}))
