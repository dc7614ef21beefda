r"""Is the final answer of a completion right?  One extraction and one comparison, for training and evaluation alike.

    is_correct("Thus 3/4 of it: \\boxed{\\frac34}.", gold="0.75")  ->  True

1. `find_answer` says where the answer stands; the outcome probe cuts its segments at the same place.
2. `normalise.py` undoes differences of notation by rewriting text.
3. Then, from cheap to dear: equal text, equal exact numbers (fractions.Fraction, never floats), equal parts of lists,
   tuples, matrices; only what is left is parsed as mathematics, by math-verify in a child process with a time and a
   memory limit (`mathworker.py`).  Nothing here evaluates model output, and a doubtful answer is a wrong one.

Conventions where readers could differ        counts as right                        does not
    decimals for an exact gold                 2/7 = 0.285714 (six or more)           2/7 = 0.29
    more digits than a decimal gold            0.192 = 0.1919 (three or more digits)  0.5 = 0.46; 0.192 = 0.19
    percent                                    18% = 0.18 = 18; 1800% = 18            18% = 1800%
    unit left out, added, or unknown           18 cm = 18; 5 apples = 5               5 m = 5 h; 18 cm = 18 cm^2
    base suffix                                1203_5 = 1203; 178 = 1203_5            1203_5 = 1203_6; 1203_5 = 178
    decimal comma                              0.5 = 0,5 when gold is not an integer  12,400 = 12.4
    three digits after a comma                 12,400 is one number                   "12, 400" is a list
    order                                      512, 729 = 729, 512; {3,8} = 3, 8      (3,8) = (8,3); (3,8) = {3,8}
    list against tuple                         (3,8) = 3, 8, in order                 (3,8) = 8, 3
    integers set apart by spaces               7 5 = 7 5                              7 5 = 75; 7 5 = 7, 5
    names                                      x=11 = 11; y=2t = f(t)=2t; m+n=5 = 5   x=11 = y=11; 2x+y=5 = 5
    a \approx b                                a, but b for a decimal gold            either of them
    words                                      Monday = monday; B = (b) = B: 12       anagrams; a gold in prose = 9
    \boxed{512} and \boxed{729}                one list of two                        729
    run-on text: "#### 12  Question: ... #### 9"  12                                   9
"""
import re
import time

from oar.extract import AnswerSpan, extract_answer, find_answer
from oar.mathworker import WorkerLost, equal
from oar.normalise import (MAX_ANSWER, agree, has_condition, is_wrapped, normalise, parse_number, split_top, split_unit,
                           units_clash)

__all__ = ["AnswerSpan", "extract_answer", "find_answer", "is_correct"]

MAX_ITEMS = 50            # of a list that is compared item by item
MAX_DEPTH = 6             # of lists in tuples in sets
MAX_NESTING = 40          # of brackets of any kind
PAIR_SECONDS = 2.5        # for math-verify on one pair of formulas
TEXT_SECONDS = 4.0        # for all the pairs of one text


def is_correct(text: str, gold) -> bool:
    """Whether the final answer of `text` equals `gold`, or one of them when gold is a list of alternatives.

    A text that is not a string, or holds no answer, is wrong.  A gold may be a number; one that itself holds a box or
    a #### line stands for the answer there.  Raises nothing whatever the text holds, and takes at most about five
    seconds; an answer that cannot be decided in that time is wrong.
    """
    answer = extract_answer(text)
    if answer is None:
        return False
    deadline = time.monotonic() + TEXT_SECONDS
    try:
        return any(_equivalent(_bare_gold(str(one)), answer, deadline)
                   for one in (gold if isinstance(gold, (list, tuple)) else [gold]))
    except WorkerLost:
        return False


def _bare_gold(gold: str) -> str:
    return extract_answer(gold) or "" if re.search(r"\\boxed|\\fbox|####", gold) else gold.strip()


_LETTER = re.compile(r"\(?([A-J])\)?")
_CHOICE = re.compile(r"(?!.*,\(?[A-J]\)?(?:[.:)]|$))(?:\(([A-Ja-j])\)|([A-Ja-j])(?:[.:)]|$))")     # not (B),(C)
_INTEGERS = re.compile(r"-?\d+(?: -?\d+)+")
_WORDS = re.compile(r"[A-Za-z][A-Za-z ,.'()-]+")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]+\})?(.*)\\end\{\1\}")
_SYMBOL = re.compile(                                           # x, \theta, m_{max}, f(x), \text{area}
    r"\\?([A-Za-z]|(?<=\\)[A-Za-z]+|text\{[^{}]*\})(?:_(?:\w|\\?[A-Za-z]+|\{[^{}]*\}))?'*(?:\(([^()]*)\))?")
_INEQUALITY = re.compile(r"[<>]|\\[lg]e(?![a-zA-Z])")
_BASE = re.compile(r"\(?(\d[\dA-Fa-f]*)\)?_\{?(\d{1,2})\}?")


def _equivalent(gold: str, answer: str, deadline: float) -> bool:
    """Whether a gold and an answer, both as written, mean the same."""
    if gold == answer or max(len(gold), len(answer)) > MAX_ANSWER or _nesting(answer) > MAX_NESTING:
        return gold == answer
    gold, answer = normalise(gold), normalise(answer)
    return bool(gold and answer) and _same(gold, answer, deadline)


def _nesting(text: str) -> int:
    depth = deepest = 0
    for bracket in re.findall(r"[()\[\]{}]", text):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def _same(gold: str, answer: str, deadline: float, depth: int = 0) -> bool:
    """Whether two normal forms mean the same: as text, as a choice, as integers, part by part, else as single values."""
    if _key(gold) == _key(answer):
        return True
    if letter := _LETTER.fullmatch(gold):
        choice = _CHOICE.match(re.sub(r"^(?:option|choice) ?", "", answer, flags=re.I))
        return choice is not None and (choice[1] or choice[2]).upper() == letter[1]
    if depth > MAX_DEPTH or any(_INTEGERS.fullmatch(text) or _is_prose(text) for text in (gold, answer)):
        return False
    gold, answer = _best_side(gold, gold), _best_side(answer, gold)
    if re.fullmatch(r"-?\d+,\d+", answer) and (number := parse_number(gold)) and number.value.denominator > 1:
        answer = answer.replace(",", ".")                       # a decimal comma: this gold is no list
    gold_kind, gold_parts = _parts(gold)
    kind, parts = _parts(answer)
    kinds = {gold_kind, kind}
    if kinds == {"one"}:
        return _same_statement(gold_parts[0], parts[0], deadline, depth)
    if kinds == {"one", "list"} and all(
            _INEQUALITY.search(part) for part in (gold_parts if gold_kind == "list" else parts)):
        gold, answer = r"\lor ".join(gold_parts), r"\lor ".join(parts)      # x<1 or x>2 against a union of intervals
        return _same_value(gold, answer, deadline)
    if kinds <= {"one", "list", "set"}:
        return _same_unordered(gold_parts, parts, deadline, depth)
    if len(kinds) == 1 or "()" in kinds and kinds & {"list", "column"}:
        return len(gold_parts) == len(parts) <= MAX_ITEMS and all(
            _same(g, a, deadline, depth + 1) for g, a in zip(gold_parts, parts))
    return "one" in kinds and "ratio" not in kinds and _same_statement(gold, answer, deadline, depth)   # [2,5), 2<=x<5


def _same_unordered(golds: list[str], answers: list[str], deadline: float, depth: int) -> bool:
    """Whether the parts can be paired off, each gold with one answer."""
    if len(golds) != len(answers) or len(golds) > MAX_ITEMS:
        return False
    unpaired = list(answers)
    for gold in golds:
        candidates = sorted(unpaired, key=lambda answer: _key(answer) != _key(gold))      # equal text first: it is free
        partner = next((a for a in candidates if _same(gold, a, deadline, depth + 1)), None)
        if partner is None:
            return False
        unpaired.remove(partner)
    return True


def _parts(text: str) -> tuple[str, list[str]]:
    r"""The kind of an answer and its parts: "one", "list" (a, b and a \pm b), "set", "()" or another pair of brackets,
    "ratio", "column" (a matrix one entry wide) or "matrix {3}" (three entries wide)."""
    if text.startswith(r"\{") and text.endswith(r"\}") and is_wrapped(text[1:-2] + "}"):
        return "set", _parts(text[2:-2])[1]
    items = [variant for part in split_top(text, ",") if part.strip() for variant in _plus_and_minus(part)]
    if len(items) != 1:
        return "list", items
    if is_wrapped(text) and text[0] != "{" and len(inner := split_top(text[1:-1], ",")) > 1:
        return text[0] + text[-1], inner
    if matrix := _MATRIX.fullmatch(text):
        rows = [split_top(row, "&") for row in re.split(r"\\\\(?:\[[^\]]*\])?", matrix[2]) if row.strip()]
        shapes = {len(row) for row in rows}
        return "column" if shapes == {1} else f"matrix {shapes}", [entry for row in rows for entry in row]
    if len(ratio := split_top(text, ":")) > 1:
        return "ratio", ratio
    return "one", items


def _plus_and_minus(text: str) -> list[str]:
    if r"\pm" not in text and r"\mp" not in text:
        return [text]
    return [text.replace(r"\pm", one).replace(r"\mp", other).replace("=+", "=").removeprefix("+").replace(" ", "")
            for one, other in ("+-", "-+")]


def _best_side(text: str, gold: str) -> str:
    r"""Of "a \approx b" the exact side, unless it is only a name; the other one for a decimal gold."""
    exact, approx, rounded = text.partition(r"\approx")
    if not approx:
        return text
    number = parse_number(split_unit(gold)[0])
    return rounded.strip() if number and number.step or not exact or _SYMBOL.fullmatch(exact) else exact.strip()


def _same_statement(gold: str, answer: str, deadline: float, depth: int) -> bool:
    """Whether two single statements agree: "x = 5" states 5, and of "a = b = c" the last part counts."""
    gold_name, gold_value = _name_and_value(gold)
    name, value = _name_and_value(answer)
    gold_symbol, symbol = (n is not None and _SYMBOL.fullmatch(n) for n in (gold_name, name))
    if gold_name is None and name is None:
        return _same_value(gold, answer, deadline)
    if gold_symbol and symbol:
        if bool(gold_symbol[2]) == bool(symbol[2]) and gold_symbol[1].lower() != symbol[1].lower():
            return _same_value(gold, answer, deadline)          # y=2x+1 against x=(y-1)/2, but not x=11 and y=11
        if symbol[2] and gold_symbol[2] and symbol[2].isalpha() and gold_symbol[2].isalpha():     # f(z)=z and f(x)=x
            value = re.sub(rf"(?<![A-Za-z\\]){symbol[2]}(?![A-Za-z])", gold_symbol[2], value)
    elif gold_name is not None and name is not None:
        return _same_value(gold, answer, deadline)
    elif not (gold_symbol or gold_name is None and _is_droppable(name)):
        return False
    return _same(gold_value, value, deadline, depth + 1)


def _name_and_value(text: str) -> tuple[str | None, str]:
    r"""("x=2+3=5") -> ("x", "5"), ("x\in[2,5)") -> ("x", "[2,5)"), ("x+1") -> (None, "x+1")."""
    name, member, values = text.partition(r"\in")
    if member and _SYMBOL.fullmatch(name) and not values[:1].isalpha():
        return name, values.strip()
    first, *rest = split_top(text, "=")
    return (first, rest[-1]) if rest and first and rest[-1] else (None, text)


def _is_droppable(name: str) -> bool:
    """Whether the left side only names or computes the answer (m+n, AB, 6/2); 2x+5y = 7 states more than 7."""
    bare = re.sub(r"[_^](?:\w|\{[^{}]*\})|\([^()]*\)|\\[a-zA-Z]+", "", name)
    return not (re.search("[A-Za-z]", bare) and re.search(r"\d", bare))


def _same_value(gold: str, answer: str, deadline: float) -> bool:
    """Whether two single values are equal: numbers exactly, words as text only, formulas by math-verify."""
    (gold, gold_unit), (answer, unit) = split_unit(gold), split_unit(answer)
    if units_clash(gold_unit, unit):
        return False
    if _key(gold) == _key(answer):
        return True
    if base := _BASE.fullmatch(gold):
        return base[1].lstrip("0") == answer.strip("()0")               # the suffix may be left out, not changed
    gold_number, number = parse_number(gold), parse_number(answer)
    if (base := _BASE.fullmatch(answer)) and gold_number:
        return _in_base(base[1], int(base[2])) == gold_number.value
    if gold_number and number:
        return agree(gold_number, number)
    if any(_WORDS.fullmatch(text) and len(text) > 2 for text in (gold, answer)) or len(gold + answer) == 2:
        return False                                            # words, or two letters, that are not the same text
    if has_condition(answer):
        return False
    seconds = min(PAIR_SECONDS, deadline - time.monotonic())
    if seconds <= 0:
        raise WorkerLost
    return equal(gold, answer, seconds)


def _in_base(digits: str, base: int) -> int | None:
    try:
        return int(digits, base)
    except ValueError:                                                  # no such base, or no such digit in it
        return None


def _key(text: str) -> str:
    """What equal texts share: no \\text{}, no spaces but between digits, no capitals in words of two or more letters."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)
    return text.casefold() if _WORDS.fullmatch(text) else text


def _is_prose(text: str) -> bool:
    words = re.sub(r"\\(?:text|begin|end)\{[^{}]*\}|\\[a-zA-Z]+", " ", text)
    return len(re.findall("[A-Za-z]{3,}", words)) > 3
