r"""An answer as people write it -> one normal form, and the exact numbers in it.

`normalise` only rewrites text: it never evaluates anything, so nothing in an answer can do harm or take long.
It undoes differences that carry no meaning, in this order:

1. characters   zero-width marks go; unicode minus, full-width digits, superscripts, vulgar fractions, symbols: to LaTeX
2. layout       math delimiters, \left, \displaystyle, spacing commands, boxes, bold marks, stray braces
3. spelling     \dfrac and \frac12 -> \frac{1}{2}; \mathrm, \mbox -> \text; \varnothing -> \emptyset; 12th -> 12
4. dressing     currency signs and the degree sign go; "percent" and \% become %
5. lists        "and", "or", ";" become commas: "5 or 6" is a list of two, never the number 5
6. digits       12,400  12{,}400  12\,400  1 000 000 become plain digits; (1,234) and 1,234,5 stay lists

`parse_number` reads the result as an exact fraction when it is one number (no floats anywhere), `split_unit` takes a
trailing unit off, `split_top` cuts at separators outside brackets.
"""
import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

MAX_ANSWER = 2000          # characters; a longer answer is compared as plain text only
MAX_POWER_BITS = 20000     # of a power read exactly, so that 9^9999999 costs nothing

_CHARACTERS = str.maketrans({
    **{c: None for c in "\u00ad\u061c\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u2064\ufeff"},
    **{c: "-" for c in "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d"},
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/", "√": r"\sqrt ",
    "∞": r"\infty ", "°": r"^\circ ", "º": r"^\circ ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "…": r"\ldots ",
    "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ",
    "“": '"', "”": '"', "’": "'", "‘": "'",
})
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_VULGAR_FRACTIONS = re.compile("[¼½¾⅐-⅞]")

_REWRITES = [(re.compile(pattern), new) for pattern, new in (
    # layout; blanks are reduced to single spaces before patterns look for them, which keeps every pattern fast
    (r"\s+", " "),
    (r"\\(?:left|right)\s*\.", ""),
    (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|boxed|fbox)(?![a-zA-Z])", ""),
    (r"\\!\s*", ""),
    (r"\{\s*,\s*\}", ","),
    (r"(?<!\\)(?:\\(?:[,;:> ]|q?quad(?![a-zA-Z]))|~)", " "),
    (r"(?<!\\)\\[()\[\]]", ""),
    (r"(?<=[\w)}])\*\*(?=[\w({-])", "^"),       # 2**10
    (r"\*\*", ""),
    (r"\s+", " "),
    # spelling
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:math(?:rm|bf|it|sf)|text(?:bf|it|rm|normal)|[mh]box|operatorname|boldsymbol|bm)\s*\{", r"\\text{"),
    (r"\{\s*\\rm\s+([^{}]*)\}", r"\\text{\1}"),
    (r"\\(?:varnothing|empty)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"(?:\\text)?\{\s*\}", ""),
    (r"\\leq?(?:slant)?(?![a-zA-Z])|<=", r"\\le "),
    (r"\\geq?(?:slant)?(?![a-zA-Z])|>=", r"\\ge "),
    (r"\\neq?(?![a-zA-Z])|!=", r"\\ne "),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\langle(?![a-zA-Z])", "("),
    (r"\\rangle(?![a-zA-Z])", ")"),
    (r"\\[lcd]?dots[cbm]?(?![a-zA-Z])|\.\.\.", r"\\ldots "),
    (r"\^\s*(-\d+|\d{2,})", r"^{\1}"),          # 10^-8, 2^10
    (r"(\d)\s*(?:\^\s*(?:\{\s*)?)?(?:\\text\{\s*(?:st|nd|rd|th)\s*\}|(?:st|nd|rd|th)(?![a-zA-Z]))\s*\}?", r"\1"),
    # \text{(C)}, \mathrm{d}x; not the unit in 5\text{ m}
    (r"(?<![\w\s}])\\text\{\s*(\(?[A-Za-z]\)?[.:)]?|\d+)\s*\}", r"\1"),
    # dressing
    (r"\\?[$€£¥₹₩₽]", ""),
    (r"\\%|\s*(?:\\text\{\s*)?\bper\s?cent(?:age)?\b(?:\s*\})?", "%"),
    (r"\s*\^\s*\{?\s*\\circ\s*\}?(?:\s*[CF](?![a-zA-Z]))?|\s*\\degrees?(?![a-zA-Z])", ""),
    (r"(?<=\d)(?:\s*\^\s*\{?\s*(?:\\prime\s*)+\}?|'{1,2})(?!\d)", ""),         # arc minutes and seconds
    # lists
    (r"\s*,?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![\w\\])(?:and|or)(?!\w)|\\lor(?![a-zA-Z])|;)\s*", ", "),
    # braces that group nothing
    (r"([_^])\{(\w)\}", r"\1\2"),
    (r"(?<![\w}\]^_])\{(-?[\d.]+)\}", r"\1"),
    (r"\s+", " "),
)]
# One number only where nothing around says list: not right after ( [ or \{, and no ungrouped part on either side.
_DIGIT_GROUPS = re.compile(
    r"(?<![\w.,(\[])(?<!\\\{)(?<!\d )([1-9]\d{0,2})((?:,\d{3})+|(?: \d{3})+(?! ?/))(?![\d,]| \d)")
_ARGUMENT = re.compile(r"\s*(\\[a-zA-Z]+|[^\s\\}])?")       # of \frac: a command, a { or one character


def normalise(answer: str) -> str:
    """The normal form of an answer of at most MAX_ANSWER characters (callers compare longer ones as they stand)."""
    text = _SUPERSCRIPTS.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m[0]) + "}", answer)
    text = _VULGAR_FRACTIONS.sub(lambda m: " " + unicodedata.normalize("NFKC", m[0]), text)
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    text = _brace_arguments(_drop_stray_braces(text))
    text = _DIGIT_GROUPS.sub(lambda m: m[1] + m[2].replace(",", "").replace(" ", ""), text)
    text = re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)      # spaces matter in "7 5", "3 1/4", "\pi r" only
    text = text.strip('"`* ').lstrip(",;:").rstrip(".,;:").removeprefix("+")
    whole = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    return whole[1].strip(" .") if whole else text


def brace_pairs(text: str) -> dict[int, int]:
    r"""Position of each { -> position of the } that closes it, in one pass; \{ and \} are characters, not braces."""
    unclosed, pairs = [], {}
    for brace in re.finditer(r"\\.|[{}]", text):
        if brace[0] == "{":
            unclosed.append(brace.start())
        elif brace[0] == "}" and unclosed:
            pairs[unclosed.pop()] = brace.start()
    return pairs


def _drop_stray_braces(text: str) -> str:
    r"""Remove braces without a partner: two boxes joined as "3} and \boxed{4" lose theirs."""
    pairs = brace_pairs(text)
    paired = pairs.keys() | set(pairs.values())
    return re.sub(r"\\.|[{}]", lambda m: m[0] if len(m[0]) == 2 or m.start() in paired else "", text)


def _brace_arguments(text: str) -> str:
    r"""Put the arguments of \frac, \binom and \sqrt in braces: \frac12, \frac{a}2, \frac\pi2, \sqrt 3."""
    pairs, inserts = brace_pairs(text), []
    for command in re.finditer(r"\\(frac|binom|sqrt)(?![a-zA-Z])(?:\[[^\[\]{}]*\])?", text):
        position = command.end()
        for _ in range(1 if command[1] == "sqrt" else 2):
            argument = _ARGUMENT.match(text, position)
            if argument[1] == "{":
                position = pairs[argument.start(1)] + 1
            elif argument[1]:
                position = argument.end()
                inserts += [(argument.start(1), "{"), (position, "}")]
    pieces, done = [], 0
    for position, brace in sorted(inserts, key=lambda insert: insert[0]):
        pieces += [text[done:position], brace]
        done = position
    return "".join(pieces) + text[done:]


def split_top(text: str, separator: str) -> list[str]:
    """Cut at the separators that stand outside all brackets; ( [ { open and ) ] } close, whatever their kind."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c in separator and depth <= 0:
            parts.append(text[start:i])
            start = i + 1
    return parts + [text[start:]]


def is_wrapped(text: str) -> bool:
    """Whether one pair of brackets, possibly unlike ones, holds the whole text: (1,2] does, (1,2)(3,4) does not."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth <= 0:
            return 0 < i == len(text) - 1 and depth == 0
    return False


class Number(NamedTuple):
    """An exact value and, when it was written as a decimal, the step of its last digit (0.25 -> 1/100)."""
    value: Fraction
    step: Fraction | None = None
    percent: bool = False


def agree(gold: Number, answer: Number) -> bool:
    """Whether two numbers are equal, or one is a fair rounding of the other.

    An answer may round an exact gold to six or more decimals, and may be more precise than a decimal gold of three or
    more significant digits that it rounds to.  It is never enough to be close: tiny numbers differ like any others.
    """
    if gold.percent != answer.percent:      # 18% against 0.18, or with its sign left out
        bare = [Number(n.value, n.step) for n in (gold, answer)]
        hundredth = [Number(n.value / 100, n.step and n.step / 100) if n.percent else n for n in (gold, answer)]
        return agree(*bare) or agree(*hundredth)
    if gold.value == answer.value:
        return True
    if gold.step and abs(gold.value) >= 100 * gold.step and _round(answer.value, gold.step) == gold.value:
        return True
    fine = answer.step and answer.step <= Fraction(1, 10**6) and abs(answer.value) >= 100 * answer.step
    return bool(fine) and answer.value in (_round(gold.value, answer.step), _truncate(gold.value, answer.step))


def _round(value: Fraction, step: Fraction) -> Fraction:
    nearest = int(abs(value) / step + Fraction(1, 2)) * step
    return nearest if value >= 0 else -nearest


def _truncate(value: Fraction, step: Fraction) -> Fraction:
    return int(value / step) * step


_DECIMAL = r"(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})"       # int() takes quadratic time and refuses 4300 digits
_PLAIN = re.compile(
    rf"([+-]?)({_DECIMAL})(?:[eE]([+-]?\d{{1,3}})|(?:\\times|\\cdot|\*|x)? ?10\^\{{?(-?\d{{1,3}})\}}?)?")
_QUOTIENT = re.compile(
    rf"([+-]?)(\d{{1,400}}(?= |\\))? ?"
    rf"(?:({_DECIMAL})/({_DECIMAL})|\\frac\{{([+-]?{_DECIMAL})\}}\{{([+-]?{_DECIMAL})\}})")
_POWER = re.compile(r"([+-]?)(\d{1,400})\^\{?([+-]?\d{1,6})\}?")
_SCALED = re.compile(r"(.+?) ?(?:\\text\{)?(hundred|thousand|million|billion|trillion)\}?")
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def parse_number(text: str) -> Number | None:
    r"""The exact number a normal form states, None when it is not one number or too large to be read exactly.

    Reads 58, -0.50, .5, 3/4, \frac{3}{4}, the mixed 3 1/4 and 3\frac{1}{4}, 1.8e-7, 1.8\times10^{-7}, 2^{10},
    5 million, and each of them in parentheses or followed by %.
    """
    if is_wrapped(text) and text[0] in "({":
        text = text[1:-1]
    if text.endswith("%"):
        number = _read_number(text[:-1].rstrip())
        return number and number._replace(percent=True)
    if scaled := _SCALED.fullmatch(text):
        number = _read_number(scaled[1])
        return number and Number(number.value * _SCALES[scaled[2]])
    return _read_number(text)


def _read_number(text: str) -> Number | None:
    if match := _PLAIN.fullmatch(text):
        sign, digits, *exponents = match.groups()
        scale = Fraction(10) ** int(exponents[0] or exponents[1] or 0)
        value = Fraction(digits) * scale
        decimals = len(digits.partition(".")[2])
        return Number(-value if sign == "-" else value, scale / 10**decimals if "." in digits else None)
    if match := _QUOTIENT.fullmatch(text):
        sign, whole, *parts = match.groups()
        top, bottom = (Fraction(part) for part in parts if part)
        if bottom == 0 or whole and (top < 0 or bottom < 0):
            return None
        value = Fraction(whole or 0) + top / bottom
        return Number(-value if sign == "-" else value)
    if (match := _POWER.fullmatch(text)) and int(match[2]):
        sign, base, exponent = match[1], int(match[2]), int(match[3])
        if base.bit_length() * abs(exponent) <= MAX_POWER_BITS:
            value = Fraction(base) ** exponent
            return Number(-value if sign == "-" else value)
    return None


# Units whose spellings we know, the canonical one first.  Only two known ones can clash; other words are mere labels.
_UNIT_NAMES = """m meter metre|cm centimeter centimetre|mm millimeter millimetre|km kilometer kilometre|in inch inche|
    ft foot feet|yd yard|mi mile|g gram|kg kilogram|mg milligram|t ton tonne|lb pound|oz ounce|L l liter litre|
    mL ml milliliter millilitre|s sec second|ms millisecond|min minute|h hr hour|d day|week|month|yr year|deg degree|
    rad radian|dollar|cent|mph|Hz hertz|J joule|kJ|eV|N newton|W watt|kW|V volt|A amp ampere|K kelvin|Pa|kPa|mol mole"""
_UNITS = {name: names.split()[0] for names in _UNIT_NAMES.split("|") for name in names.split()}
_NOT_A_LABEL = frozenset(
    "if not or and to unless when where except but more less least most times over plus minus than mod choose "
    "squared cubed maybe possibly perhaps false wrong".split())
_TEXT_UNIT = re.compile(r"(.*?[^\s_^+\-*/=<>,({\\]) ?/?((?:\\text\{[^{}]*\}(?:\^\{?-?\d\}?)? ?/?)+)")
_PLAIN_UNIT = re.compile(r"(.*[\d})%.])( ?)([A-Za-z][A-Za-z./ ]*?)(\^\{?-?\d\}?)?")


def has_condition(text: str) -> bool:
    """Whether words such as "not", "if", "or more" change what the rest of the text states."""
    words = re.sub(r"\\(?!text)[a-zA-Z]+", " ", text).lower()           # \times is no word
    return not _NOT_A_LABEL.isdisjoint(re.findall("[a-z]+", words))


def split_unit(text: str) -> tuple[str, str]:
    r"""("18\text{cm}^2" or "18 square centimeters") -> ("18", "cm^2"); the unit is "" where there is none.

    Words in \text{} after anything are a unit or label.  Plain words are one only after a number, and a bare letter
    only when it is a known unit set apart from the number: 5 m is a length, 5m and 5x are products.
    """
    if parse_number(text):
        return text, ""                 # "5 million" has no unit
    if match := _TEXT_UNIT.fullmatch(text):
        words = re.sub(r"\\text\{([^{}]*)\}", r"\1 ", match[2]).strip()
        if not has_condition(words):
            return match[1], words
    if (match := _PLAIN_UNIT.fullmatch(text)) and parse_number(match[1]):
        core, space, words, power = match.groups()
        shortest = 1 if space else 2
        is_unit = all(word in _UNITS and len(word) >= shortest or len(word) >= shortest + 2 or word in ("of", "sq", "cu")
                      for word in _singular(words))
        if is_unit and not has_condition(words):
            return core, words + (power or "")
    return text, ""


def units_clash(one: str, other: str) -> bool:
    """Whether both are units we know and they differ: metres against hours, cm against cm^2."""
    known = [_canonical_unit(unit) for unit in (one, other)]
    return None not in known and known[0] != known[1]


def _singular(words: str) -> list[str]:
    words = re.findall("[A-Za-z]+", words)
    return [word[:-1] if word not in _UNITS and word.endswith("s") else word for word in words]


def _canonical_unit(unit: str) -> str | None:
    match = re.fullmatch(r"(?:(square|sq)\.? |(cubic|cu)\.? )?([A-Za-z]+) ?\^?\{?(\d?)\}?", unit)
    if not match:
        return None
    name = _singular(match[3])[0]
    name = _UNITS.get(name) or _UNITS.get(name.lower() if len(name) > 1 else name)
    power = "2" if match[1] else "3" if match[2] else match[4]
    return name and name + power
