"""math-verify in a child process that can be killed: the only place where model output is parsed as mathematics.

Model output can ask for 9^(9^(9^9)), a factorial with a million digits or an endless simplification, and nothing
inside a Python process stops that reliably (math-verify's own time limit uses SIGALRM, which threads cannot, and
which big-integer arithmetic ignores).  So the parent sends a pair of LaTeX strings, waits, and kills:

    parent   equal(gold, answer, seconds)      one JSON line each way over pipes; no pickle, no shell
    child    python -m oar.mathworker          parses both, answers {"equal": true | false}

1. The child starts at the first call and is reused; a killed one costs its verdict, and the next is started at once.
2. The child limits its own memory, and an alarm ends it should the parent die while it computes.
3. A lock lets threads share one child; a forked process (a DataLoader worker) forgets its parent's and starts its own.
4. Without math-verify one warning is given, and only text and numbers are compared from then on.
"""
import atexit
import json
import os
import random
import re
import selectors
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

from oar.normalise import Number, agree, parse_number

START_SECONDS = 60            # imports of the child: the machine's speed, not the text's
MEMORY_BYTES = 1 << 30
DIGITS = 40                   # of numeric evaluation; two constants are equal when they agree to 3/4 of them


class WorkerLost(Exception):
    """The child was killed, or died, over the pair it was asked about: there is no verdict."""


_lock = threading.Lock()
_child: subprocess.Popen | None = None
_ready = False                # whether the child has reported that its imports are done
_missing = False              # whether it reported that math-verify is not installed


def equal(gold: str, answer: str, seconds: float) -> bool:
    """Whether two LaTeX strings mean the same, by math-verify in the child.

    Raises WorkerLost when there is no verdict within `seconds` (the wait for a child that still starts not counted).
    """
    with _lock:
        try:
            if not _is_ready():
                return False
            request = json.dumps({"gold": gold, "answer": answer, "seconds": seconds})
            _child.stdin.write(request.encode() + b"\n")
            return _receive(seconds)["equal"]
        except BaseException as error:      # even KeyboardInterrupt: a reply left in the pipe would answer the next one
            _stop()
            with suppress(OSError):
                _start()
            if isinstance(error, OSError):
                raise WorkerLost from error
            raise


def _is_ready() -> bool:
    """Wait until the child has imported math-verify; where it cannot, warn once and say False from then on."""
    global _ready, _missing
    if not _ready and not _missing:
        _start()
        try:
            reason = _receive(START_SECONDS)["missing"]
        except WorkerLost:
            reason = "its process ended or took too long"
        _ready, _missing = not reason, bool(reason)
        if _missing:
            _stop()
            warnings.warn(f"math-verify cannot be used ({reason}): answers are compared as text and exact numbers only, "
                          "so equal formulas written differently count as wrong (pip install math-verify)", stacklevel=4)
    return _ready


def _start() -> None:
    """Start a child unless there is one; it imports in the background until it is asked."""
    global _child
    if _child is None:
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        _child = subprocess.Popen([sys.executable, "-m", "oar.mathworker"], env={**os.environ, "PYTHONPATH": path},
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
                                  start_new_session=True)     # a signal to the parent's group must not cost a verdict


def _receive(seconds: float) -> dict:
    """The child's next line; WorkerLost when it does not come in time or the child is gone."""
    deadline, received = time.monotonic() + seconds, b""
    with selectors.DefaultSelector() as selector:
        selector.register(_child.stdout, selectors.EVENT_READ)
        while not received.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise WorkerLost
            chunk = os.read(_child.stdout.fileno(), 65536)
            if not chunk:
                raise WorkerLost
            received += chunk
    return json.loads(received)


def _stop() -> None:
    """Kill the child, if any, and reap it."""
    global _child, _ready
    if _child is not None:
        _child.kill()
        _child.wait()
        _child.stdin.close()
        _child.stdout.close()
    _child, _ready = None, False


def _forget() -> None:
    """In a forked process: the child is the parent's and the lock may be held by a thread that is not here."""
    global _lock, _child, _ready
    _lock = threading.Lock()
    if _child is not None:
        _child.stdin.close()
        _child.stdout.close()
    _child, _ready = None, False


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

# ---------------------------------------------------------------------------------------------------------------------
# The child.  Everything below runs there, on text nobody has checked.

def main() -> None:
    """Answer one JSON line per request until the parent closes the pipe; report first whether math-verify is there."""
    import resource
    import signal
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)              # nothing that a library prints may pass for a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)              # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        _meaning_equal("x^2", "x x")                          # imports, and the parser's tables
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), file=replies)
        return
    print(json.dumps({"missing": ""}), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + 1)      # default action: the process ends
        try:
            verdict = _meaning_equal(request["gold"], request["answer"])
        except MemoryError:
            raise
        except Exception:                                     # whatever the libraries make of it, it is not the gold
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"equal": bool(verdict)}), file=replies)


def _meaning_equal(gold_text: str, answer_text: str) -> bool:
    """Numbers where they decide, math-verify for what is left: sets, relations, matrices."""
    from math_verify import verify
    from sympy import Eq, Expr
    if r"\lor " in gold_text + answer_text:
        return _solutions(gold_text).symmetric_difference(_solutions(answer_text)).is_empty
    (gold_text, unknowns), (answer_text, _) = _without_derivatives(gold_text), _without_derivatives(answer_text)
    gold, answer = _parse(gold_text), _parse(answer_text)
    if gold is None or answer is None:
        return False
    verdict = None
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        verdict = _rounded(gold, answer, gold_text, answer_text) or _same_values(gold, answer)
    elif isinstance(gold, Eq) and isinstance(answer, Eq):
        verdict = _same_equation(gold, answer, unknowns)
    if verdict is None:
        verdict = verify(gold, answer, float_rounding=15, numeric_precision=100, allow_set_relation_comp=True,
                         timeout_seconds=None)
    return verdict


def _solutions(latex: str):
    r"""The set that "x < 1 \lor x > 2" describes, or the union of intervals written as such."""
    from sympy import Set, Union
    parts = [_parse(part) for part in latex.split(r"\lor ")]
    return Union(*[part if isinstance(part, Set) else part.as_set() for part in parts])


_DERIVATIVE = re.compile(
    r"\\frac\{d(?:\^(\d))? ?(\w+)\}\{d ?\w(?:\^\1)?\}|\\(d+)ot\{(\w+)\}|(?<!\\)\b([A-Za-z](?:_\w)?)('+)")


def _without_derivatives(latex: str) -> tuple[str, set[str]]:
    r"""dv/dt, \dot{v} and v' as one plain symbol, v(t) as v: a differential equation compares like any other.

    Returns the text and the names of the unknown functions and their derivatives.
    """
    unknowns = set()

    def symbol(match: re.Match) -> str:
        function = match[2] or match[4] or match[5]
        order = int(match[1] or 1) if match[2] else len(match[3] or match[6])
        unknowns.update((function.lower(), f"delta_{{{function}{order}}}".lower()))
        return rf"\delta_{{{function}{order}}}"

    latex = _DERIVATIVE.sub(symbol, latex)
    return re.sub(r"\b([A-Za-z](?:_\w)?)\([a-z]\)", r"\1", latex) if unknowns else latex, unknowns


def _parse(latex: str):
    """The sympy object math-verify reads from a formula, fit for evaluation; None when it reads none."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import Float, I, Rational, Symbol
    from sympy.core.function import AppliedUndef
    # Units are off: they are ours to strip, and here a trailing t, c or m would be taken for one.
    config = LatexExtractionConfig(boxed_match_priority=0, normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last"))
    found = parse(f"\\boxed{{{latex}}}", [config], fallback_mode="no_fallback", parsing_timeout=None)
    if not found:
        return None
    exact = {number: Rational(str(number)) for number in found[0].atoms(Float)}
    names = {symbol: I if symbol.name == "i" else Symbol(symbol.name) for symbol in found[0].atoms(Symbol)}
    opaque = {value: Symbol(str(value)) for value in found[0].atoms(AppliedUndef)}
    return found[0].xreplace({**exact, **names, **opaque})


def _rounded(gold, answer, gold_text: str, answer_text: str) -> bool:
    """Whether one is written as a decimal and the other is a constant, and the two agree by the rules for rounding."""
    numbers = [parse_number(gold_text), parse_number(answer_text)]
    if sum(number is None for number in numbers) != 1 or not any(number and number.step for number in numbers):
        return False
    constant = gold if numbers[0] is None else answer
    if constant.free_symbols or not (value := constant.evalf(DIGITS)).is_Float:
        return False
    return agree(*(number or Number(Fraction(str(value))) for number in numbers))


def _value(expression, point: int, fixed: set = frozenset()):
    """The expression's value where each symbol takes a number of its own, which differs from point to point unless the
    symbol is `fixed`; None where there is none."""
    from sympy import Rational
    values = {}
    for symbol in expression.free_symbols:
        numbers = random.Random(f"{symbol} {0 if symbol in fixed else point}")
        values[symbol] = (Rational(numbers.randint(300, 2500), 997) if point < 3          # fractions from 0.3 to 2.5
                          else numbers.randint(5, 15) if point < 5                        # integers, for floors
                          else Rational(-numbers.randint(300, 2500), 997))
    value = expression.subs(values).evalf(DIGITS)
    return value if value.is_finite and all(part.is_Number for part in value.as_real_imag()) else None


def _same_values(gold, answer) -> bool | None:
    """Whether two expressions take the same values at six points; None when fewer than three of them can be evaluated.

    Different formulas that agree at all of them are all but impossible, and nothing has to be simplified.
    """
    from sympy import simplify
    if not gold.free_symbols and not answer.free_symbols:
        gold, answer = gold.doit(), answer.doit()
        if gold.is_Rational and answer.is_Rational:
            return gold == answer               # however large: 10^100 and 10^100 + 1
    compared = 0
    for point in range(6):
        g, a = _value(gold, point), _value(answer, point)
        if g is None or a is None or point == 5 and not (g.is_real and a.is_real):
            continue                            # roots and logarithms of negative numbers: a matter of branches
        if abs(g - a) > max(abs(g), abs(a)) * 10 ** -(3 * DIGITS // 4):
            tiny = min(abs(g), abs(a)) < 10 ** -(DIGITS // 2)
            return bool(tiny) and simplify(gold - answer) == 0      # a zero in disguise evaluates to noise
        compared += 1
    return True if compared >= 3 else None


def _same_equation(gold, answer, unknowns: set[str]) -> bool | None:
    """Whether one equation is a multiple of the other: x - y = 1 and 2y = 2x - 2; None when that cannot be evaluated.

    The factor of a differential equation may hold anything but its unknowns: m v' + b v = f and v' + (b/m) v = f/m.
    """
    sides = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    fixed = {s for s in sides[0].free_symbols | sides[1].free_symbols if unknowns and s.name not in unknowns}
    ratios = []
    for point in range(3):
        g, a = (_value(side, point, fixed) for side in sides)
        if not g or not a:
            return None
        ratios.append(g / a)
    return all(abs(ratio - ratios[0]) <= abs(ratios[0]) * 10 ** -(DIGITS // 2) for ratio in ratios)


if __name__ == "__main__":
    main()
