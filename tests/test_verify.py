"""The verifier: what counts as the answer, what counts as equal, and that no text can harm or stall it.

Inputs are written for these tests; the hand-made cases and real outputs in ../shared are run too where they are.
"""
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
import warnings

import pytest
from conftest import ROOT

from oar import mathworker, verify
from oar.normalise import agree, normalise, parse_number, split_unit, units_clash
from oar.verify import extract_answer, find_answer, is_correct


def boxed(answer):
    return f"Adding it all up gives $\\boxed{{{answer}}}$."


# ---------------------------------------------------------------------------------------------------------------------
# Where the answer stands

@pytest.mark.parametrize("text, answer", [
    (r"It is \boxed{8}.", "8"),
    (r"It is \fbox{ 8 }.", "8"),
    (r"So $\boxed{\frac{1}{1+\sqrt{2}}}$ holds.", r"\frac{1}{1+\sqrt{2}}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\boxed{\fbox{8}}}", "8"),
    (r"\boxed 8 is it", "8"),
    (r"$\boxed\frac{1}{2}$", r"\frac{1}{2}"),
    (r"First \boxed{3}. No: \boxed{8}.", "8"),
    (r"\boxed{3} and then the answer is 9", "3"),                       # a box goes before a statement
    (r"an open \boxed{ brace, but then \boxed{8}", "8"),
    (r"We get \boxed{3}. Let me check. It is \boxed{", None),           # cut: the earlier box is not paid for
    (r"We get \boxed{3}. Let me check. It is \boxed", None),
    (r"We get \boxed{3}, no, \boxed{}", None),
    (r"I will write \boxed{}. The answer is 8.", "8"),
    (r"\boxed{1} and \boxed{2}", r"1} and \boxed{2"),                   # one answer of two parts
    (r"\boxed{1}, so not \boxed{2}", "2"),
    (r"\boxed{8}, \boxed{8}", "8"),
    ("2 + 6 = 8\n#### 8", "8"),
    ("2 + 6 = 8\n#### 8 apples\n", "8 apples"),
    ("#### Step 1\nadd\n#### 8", "8"),
    ("#### Conclusion\nThe answer is 8.", "8"),
    ("#### 3 so #### 8", "8"),
    ("#### 3\n#### ", None),
    ("The answer is 8.", "8"),
    ("The answer is 8. Hold on, the answer is 9.", "9"),
    ("Answer: 8\nOn reflection\nAnswer: 9", "9"),
    ("**Final Answer:** $8$", "8"),
    ("**Final Answer**\n\n8", "8"),
    ("So the answer to the riddle must be 8, because 7 is odd.", "8"),
    ("The final answer is \\[ 8 \\] as shown.", "8"),
    ("The answer is 8, the only even one.", "8"),
    ("Answer: the number of cats is 8", "8"),
    ("The answer could be 8.", None),
    ("The three of them pay $8.50 and $9, so $17.50.", "17.50"),
    ("Hence the area is $8\\pi$.", "8\\pi"),
    ("She is not 8.", None),
    ("It is 7 or 8.", None),
    ("Is it 8?", None),
    ("8", "8"),
    ("8 square feet", "8 square feet"),
    (r"The answer is $11,\! 111$.", r"11,\! 111"),
    ("AB = 8", "AB = 8"),
    ("Monday", "Monday"),
    ("total $8.00.", "8.00"),
    ("I give up.", None),
    ("", None),
    (" \n\t", None),
    ("#### 8\n\nQuestion: another one\n#### 9", "8"),
    ("The answer is 8.\nQ: another\nA: the answer is 9.", "8"),
    ("Question: is it 8?\nThe answer is 8.", "8"),                      # a leading question is not run-on
    (None, None), (8, None), (b"\\boxed{8}", None),
])
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize("text, marker, answer", [
    (r"we get \boxed{ 8 } now", r"\boxed{ ", "8"),
    (r"we get \boxed{\fbox{8}}", r"\boxed{\fbox{", "8"),
    ("so x : 3 ; #### 7 5 ", "#### ", "7 5"),
    ("Then the answer is: **8**.", "answer is: **", "8"),
    ("It comes to 8.", "", "8"),
    ("pad " * 60_000 + r"\boxed{8}", r"\boxed{", "8"),                  # offsets hold where only the end is searched
])
def test_find_answer_offsets(text, marker, answer):
    span = find_answer(text)
    assert text[span.marker_start:span.answer_start] == marker
    assert text[span.answer_start:span.answer_end] == answer == extract_answer(text)


# ---------------------------------------------------------------------------------------------------------------------
# What is equal

RIGHT = [
    # numbers as people write them
    ("2350", "2,350"), ("2350", r"2\,350"), ("2350", "2{,}350"), ("2350", "2 350"), ("2350", r"\$2,350.00"),
    ("2350", "€2350"),
    ("2,350", "2350"), ("4100200", "4 100 200"), ("9", "009"), ("009", "9"), ("9", "9."), ("9", "９"), ("-9", "−9"),
    ("9", "9\u200b"), ("0.5", ".5"), ("2.50", "2.5"), ("9", r"\text{9}"), ("9", r"\mathbf{9}"), ("7", "+7"),
    ("0.6", r"\frac35"), (r"\frac{3}{5}", r"\dfrac{6}{10}"), (r"\frac{2}{11}", r"\frac2{11}"),
    (r"\frac{-2}{5}", r"-\tfrac25"),
    ("7/2", "3 1/2"), (r"3\frac12", "3.5"), ("3½", r"\frac{7}{2}"), ("-7/2", r"-3\frac{1}{2}"),
    ("2.4e-8", r"2.4\times 10^{-8}"), ("2.4e-8", "0.000000024"), ("1024", "2^{10}"), ("3000000", "3 million"),
    (r"\frac{5}{6}", "0.8333333"), (r"\sqrt{5}", "2.236068"), ("0.317", "0.3168"),
    # percent, degrees, units, bases
    ("45\\%", "0.45"), ("45\\%", "45"), ("45%", r"45\%"), (r"\frac{9}{20}", r"45\%"), ("45%", r"45\text{ percent}"),
    ("70^\\circ", "70"), ("70", r"70^{\circ}"), ("70°", r"70\text{ degrees}"),
    (r"12\text{ kg}", "12"), ("12", r"12\,\mathrm{kg}"), ("12", "12 red marbles"), (r"12\text{ ft}", r"12\text{ feet}"),
    (r"12\text{ cm}^2", r"12\text{ square centimeters}"), ("12^{\\text{th}}", "12"),
    ("2011_3", "2011_{3}"), ("2011_3", "2011"), ("58", "2011_3"),
    # lists, tuples, sets, matrices
    ("4, -9", "-9, 4"), ("4,-9", r"4 \text{ and } -9"), (r"\{4,9\}", "9, 4"), ("4,9", r"x = 4 \text{ or } x = 9"),
    ("(4,9)", r"\left(4, 9\right)"), ("(4,9)", "4, 9"), ("(1,2),(3,4)", "(3,4), (1,2)"), (r"\emptyset", r"\{\}"),
    (r"\pm 4", "4, -4"), (r"x=\pm 4", r"\pm 4"), (r"\frac{1\pm\sqrt{5}}{2}", r"\frac{1-\sqrt5}{2}, \frac{1+\sqrt5}{2}"),
    (r"\begin{pmatrix}1\\-2\end{pmatrix}", r"\begin{bmatrix} 1 \\ -2 \end{bmatrix}"), ("2:5", "2 : 5"),
    (r"\begin{pmatrix}1/2&0\\0&1\end{pmatrix}", r"\begin{pmatrix}0.5&0\\0&1\end{pmatrix}"),
    ("1,2,\\ldots,n", "1, 2, \\dots, n"),
    # equations and names
    ("x=9", "9"), ("9", "t = 9"), ("9", r"\frac{18}{2} = 9"), ("9", "a+b = 4+5 = 9"), ("x^2", "f(x) = x^2"),
    ("y=x^2", "x^2"),
    ("f(z)=3z", "f(x)=3x"), ("3x-y+2=0", "2y=6x+4"), ("y=3x+2", "y-3x=2"), (r"4\pi", r"4\pi \approx 12.57"),
    ("12.57", r"4\pi \approx 12.57"), ("m v' + b v = f", r"\frac{dv}{dt} + \frac{b}{m} v = \frac{f}{m}"),
    # intervals
    ("x>6", r"(6,\infty)"), (r"[1,4)", r"1\le x<4"), (r"x\in[1,4)", "[1,4)"), (r"(0,1)\cup(2,3)", r"(2,3)\cup(0,1)"),
    (r"(-\infty,0)\cup(5,\infty)", r"x<0 \text{ or } x>5"),
    # formulas
    (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"), ("(a-b)^2", "a^2-2ab+b^2"), (r"\tan^2 u", r"\sec^2 u - 1"),
    ("3i-2", "-2+3i"),
    (r"\sinh(at)", r"\frac{e^{at}-e^{-at}}{2}"), (r"\binom{6}{2}", "15"), (r"\frac{1}{2+2i}", r"\frac{1-i}{4}"),
    (r"2\sqrt{3}", r"2\times\sqrt3"), (r"\lfloor\frac{n}{3}\rfloor", r"\lfloor n/3\rfloor"), ("60!", "60!"),
    # words and choices
    (r"\text{Tuesday}", "tuesday"), ("Tuesday", r"\text{Tuesday}"), (r"\text{(D)}", "D"),
    ("D", r"\textbf{(D)}\ 17"), ("D", "d"),
]
WRONG = [
    ("350", "2,350"), ("2.35", "2,350"), ("235", "2,35"), ("9", "90"), ("9", "-9"), ("9", "−9"), ("94", "9 4"),
    ("12", "1, 2"),
    (r"\frac{3}{5}", r"\frac{5}{3}"), (r"\frac{35}{1}", r"\frac{3}{5}"), ("31/2", "3 1/2"), (r"\frac{5}{6}", "0.83"),
    (r"\frac{5}{6}", "0.833334"), (r"\sqrt{5}", "2.24"), ("0.317", "0.32"), ("0.3", "0.29"),
    ("2.4e-8", "2.5e-8"), ("10^{-40}", "0"), ("0", "10^{-40}"), (r"\frac{1}{25!}", r"\frac{1}{26!}"),
    ("e^{-90}", "e^{-91}"),
    ("10^{90}", "10^{90}+1"), ("45%", r"4500\%"), ("45%", "0.0045"), (r"12\text{ m}", r"12\text{ s}"),
    (r"12\text{ cm}", "12 cm^2"),
    ("12", "12x"), ("12", r"12\pi"), ("12", "12h"), ("2011_3", "2011_4"), ("2011_3", "58"),
    ("4, -9", "4"), ("4", "4, 9"), ("4, 9", "4, 9, 9"), ("4,9", "4,-9"), ("(4,9)", "(9,4)"), ("(4,9)", "9, 4"),
    ("(4,9)", r"\{4,9\}"),
    (r"\pm 4", "4"), ("4", r"\pm 4"), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    ("2:5", "5:2"), ("2:5", "2"), ("1,2,\\ldots,n", "1"), ("x=9", "x=8"), ("x=9", "y=9"), ("9", "n=9k"),
    ("9", "2x+y=9"), ("0", "3x-y+2=0"),
    ("3x-y+2=0", "0"), ("3x-y+2=0", "2"), ("3x-y+2=0", "3x-y=2"), ("9", r"x \ne 9"), ("9", "x>9"), ("9", r"x\ge 9"),
    ("x>6", "x<6"), ("x>6", r"[6,\infty)"), ("[1,4)", "(1,4)"), ("(1,4)", "[1,4]"), (r"(0,1)\cup(2,3)", "(0,3)"),
    ("x>6", "6"),
    (r"4\sqrt{2}", "4"), (r"7\pi-3", "7"), ("x", "|x|"), ("(a-b)^2", "a^2-b^2"), ("3i-2", "3i+2"),
    ("4", r"\frac{1}{0}"),
    ("9", r"9 \text{ or } 10"), ("9", r"\text{not } 9"), ("9", r"9 \text{ or more}"), ("9", r"9 \text{ if } x>0"),
    ("9", "9?"),
    ("D", "C"), ("D", "C or D"), ("D", "(D) and (A)"), ("D", "Daniel"), ("Tuesday", "Thursday"), ("west", "stew"),
    ("Ann", "Ann's"),
    ("m", "M"), ("8. The dam holds; water stays below the upper mark.", "8"), ("", ""), ("5", r"\text{}"),
]


@pytest.mark.parametrize("gold, answer", RIGHT)
def test_right(gold, answer):
    assert is_correct(boxed(answer), gold) is True


@pytest.mark.parametrize("gold, answer", WRONG)
def test_wrong(gold, answer):
    assert is_correct(boxed(answer), gold) is False


@pytest.mark.parametrize("text, gold, right", [
    ("The answer is 9 or 10", "9", False),
    ("The answer is not 9", "9", False),
    ("The answer isn't 9.", "9", False),
    ("The answer is 9. Wait, the answer is 10.", "9", False),
    ("The answer is 9. Wait, the answer is 10.", "10", True),
    (r"\boxed{40}, \boxed{41}", "4041", False),
    (r"\boxed{40}, \boxed{41}", "41, 40", True),
    (r"\boxed{40}, \boxed{41}", "41", False),
    ("She earns $1,250.50.", "1250.5", True),
    (r"\boxed{2.4}\text{ mm}", "2.4", True),
    (r"\boxed{9}", r"Then $x = \boxed{9}$ metres.", True),              # a gold that is a worked solution
    ("#### 9", "3 + 6 = <<3+6=9>>9\n#### 9", True),
    (r"\boxed{9}", 9, True),
    (r"\boxed{0.5}", 0.5, True),
    (r"\boxed{9}", ["8", "9\n"], True),
    (r"\boxed{9}", ["8", "7"], False),
    (r"\boxed{9}", [], False),
    (None, "9", False), (9, "9", False), ("no idea", "9", False),
])
def test_texts_and_golds(text, gold, right):
    assert is_correct(text, gold) is right


@pytest.mark.parametrize("text, right", [
    ("x : 3 + 4 = 7 ; #### 7 5", True), ("#### 7 4", False), ("#### 75", False), ("#### 5 7", False), ("#### 7", False),
    ("#### 7 5 5", False), ("#### 7 + 5", False), ("#### 7 , 5", False), ("#### 7 5 hmm", False),
    ("x : 3 + 4 = 7 ;", False),
])
def test_lab_answers_need_no_worker(text, right, monkeypatch):
    monkeypatch.setattr(verify, "equal", lambda *_: pytest.fail("asked the worker"))
    assert is_correct(text, "7 5") is right


def test_numbers_need_no_worker(monkeypatch):
    monkeypatch.setattr(verify, "equal", lambda *_: pytest.fail("asked the worker"))
    start = time.perf_counter()
    for n in range(500):
        assert is_correct(boxed(f"{n:,}"), str(n)) and not is_correct(boxed(n + 1), str(n))
    assert time.perf_counter() - start < 2


# ---------------------------------------------------------------------------------------------------------------------
# The parts

@pytest.mark.parametrize("raw, normal", [
    (r"\left( 2, \dfrac{\pi}{3} \right)", r"(2,\frac{\pi}{3})"), (r"\frac{\sqrt 3}2", r"\frac{\sqrt{3}}{2}"),
    ("7 5", "7 5"),
    (r"1\,000\,000", "1000000"), ("(1,234)", "(1,234)"), ("1,234,5", "1,234,5"), ("3 and 4", "3,4"), ("2²", "2^2"),
    (r"\mbox{ blue }", "blue"), (r"10,\!080", "10080"), ("3} and \\boxed{4", "3,4"),
])
def test_normalise(raw, normal):
    assert normalise(raw) == normal


def test_numbers_are_exact():
    assert parse_number("0.1").value * 3 == parse_number("0.3").value              # 0.1 + 0.1 + 0.1 != 0.3 in floats
    assert parse_number("2^{64}").value == 2**64
    assert parse_number("1e300").value == 10**300
    assert [parse_number(text) for text in ("5/0", "9^{999999}", "1e999999999", "7 5")] == [None] * 4
    assert not agree(parse_number("10^{20}"), parse_number("100000000000000000001"))


def test_units():
    assert split_unit("5 m") == ("5", "m") and split_unit("5m") == ("5m", "") and split_unit("5x") == ("5x", "")
    assert split_unit(r"5\text{cm}^2") == ("5", "cm ^2")
    assert units_clash("m", "hours") and units_clash("cm", "cm^2")
    assert not units_clash("feet", "ft") and not units_clash("apples", "m")


# ---------------------------------------------------------------------------------------------------------------------
# Untrusted text

@pytest.mark.parametrize("template", [
    r"\boxed{%s}", "The answer is %s", "#### %s", "$%s$", r"\boxed{\text{%s}}", r"\boxed{x = %s}", r"\boxed{(%s, 1)}",
])
def test_text_is_never_evaluated(template, tmp_path):
    trap = tmp_path / "trap"
    for code in (f"__import__('pathlib').Path('{trap}').touch()", f"open('{trap}','w')", f"\\write18{{touch {trap}}}",
                 f"().__class__.__base__.__subclasses__()[0]; exec(\"open('{trap}','w')\")",
                 f"$(touch {trap})", f"`touch {trap}`"):
        assert is_correct(template % code, "7") is False
        assert is_correct(template % code, "x+1") is False
    assert not trap.exists()


HOSTILE = {
    "tower": r"\boxed{9^{9^{9^{9}}}}",
    "factorial": r"\boxed{(10^8)!}",
    "long sum": r"\boxed{\sum_{n=1}^{10^{11}}\frac{1}{n}}",
    "million digits": r"\boxed{" + "8" * 10**6 + "}",
    "huge exponent": r"\boxed{1e999999999}",
    "ten thousand boxes": r"\boxed{9}x" * 10**4,
    "open boxes": r"\boxed{" * 30_000,
    "nested boxes": r"\boxed{" * 20_000 + "9" + "}" * 20_000,
    "nested brackets": r"\boxed{" + "(" * 950 + "9" + ")" * 950 + "}",
    "nested roots": r"\boxed{" + r"\sqrt{" * 38 + "9" + "}" * 39,
    "nested sets": r"\boxed{" + r"\{" * 450 + r"\}" * 450 + "}",
    "percent signs": r"\boxed{" + "%" * 1900 + "}",
    "blanks": "The answer is 7" + " " * 150_000 + "because",
    "commas": "," * 200_000 + ".",
    "hashes": "####\n" * 40_000,
    "statements": "the answer is " * 15_000,
    "dollars": "$" * 200_000,
    **{f"only {c}": r"\boxed{" + (c * 2000)[:1900] + "}"
       for c in (r"\ ", r"\,", ",", "and ", "1 ", "|", r"\frac", r"\pm", "=", "1:", "!")},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_wrong_in_time(name):
    start = time.perf_counter()
    assert is_correct(HOSTILE[name], "2x+1") is False
    assert time.perf_counter() - start < 6
    assert is_correct(boxed("(x+1)^2"), "x^2+2x+1")                     # and the next text is none the worse for it


def test_fuzz():
    hypothesis = pytest.importorskip("hypothesis")
    pieces = hypothesis.strategies.sampled_from([
        r"\boxed{", "}", "{", r"\frac", r"\sqrt", "####", "answer is ", "^", "_", "(", ")", "[", "]", r"\{", r"\}", ",", "=", "<",
        "7", "12", "0.5", "e9", "x", "y", r"\pi", r"\pm", r"\text{", " and ", " or ", "%", "$", "\\", "\n", " ", "/", "-", "!", ":",
        r"\begin{pmatrix}", r"\end{pmatrix}", "&", r"\\", r"\cup", r"\infty", r"\le", r"\in", "é", "\u200b", "１", "½", "²", "\ud800"])
    golds = hypothesis.strategies.sampled_from(["7", "7, 12", "(7,12)", "x=7", r"\frac{x}{7}", r"[7,\infty)", "7 5"])

    @hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @hypothesis.given(hypothesis.strategies.lists(pieces, max_size=25).map("".join), golds)
    def check(text, gold):
        start = time.perf_counter()
        for candidate in (text, r"\boxed{" + text + "}"):
            assert is_correct(candidate, gold) in (True, False)
            span = find_answer(candidate)
            assert span is None or 0 <= span.marker_start <= span.answer_start < span.answer_end <= len(candidate)
        assert time.perf_counter() - start < 12

    check()


# ---------------------------------------------------------------------------------------------------------------------
# The worker: two formulas that only mathematics can compare

SAME, DIFFERENT = (boxed("2a+2b"), "2(a+b)"), (boxed("2a+b"), "2(a+b)")


def verdicts():
    return [is_correct(*SAME), is_correct(*DIFFERENT)]


def test_a_killed_worker_costs_one_verdict():
    assert verdicts() == [True, False]
    mathworker._child.kill()
    assert is_correct(*SAME) is False
    assert verdicts() == [True, False]
    first = mathworker._child.pid
    assert verdicts() == [True, False] and mathworker._child.pid == first           # reused
    assert is_correct(boxed("9^{9^{9^{9}}}"), "2(a+b)") is False                    # killed for the time it takes
    assert mathworker._child.pid != first and verdicts() == [True, False]


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit to look at another process's limit")
def test_worker_has_a_memory_limit():
    assert is_correct(*SAME)
    assert resource.prlimit(mathworker._child.pid, resource.RLIMIT_AS)[0] == mathworker.MEMORY_BYTES


def test_threads():
    results = []
    threads = [threading.Thread(target=lambda: results.extend(verdicts())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [False] * 8 + [True] * 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_process_starts_its_own_worker():
    assert verdicts() == [True, False]
    parent = mathworker._child.pid
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with mathworker._lock:                              # as if another thread were waiting for a verdict meanwhile
        process = context.Process(target=lambda: queue.put((verdicts(), mathworker._child.pid)))
        process.start()
        result, child = queue.get(timeout=60)
        process.join(60)
    assert result == [True, False] and child != parent
    assert mathworker._child.pid == parent and verdicts() == [True, False]


class Rewards:
    """A map-style dataset whose items are verdicts."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return int(is_correct(*(SAME, DIFFERENT)[index % 2]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dataloader_workers():
    torch = pytest.importorskip("torch")
    assert torch.cat(list(torch.utils.data.DataLoader(Rewards(), batch_size=2, num_workers=2))).tolist() == [1, 0, 1, 0]


def run_python(code, **environment):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True,
                          text=True, timeout=120)


def test_import_is_light():
    code = "import sys, oar.verify; sys.exit(any(name in sys.modules for name in ('sympy', 'torch', 'math_verify')))"
    assert run_python(code).returncode == 0


def test_worker_ends_with_the_program():
    code = ("from oar import mathworker, verify\n"
            "verify.is_correct('2a+2b', '2(a+b)'); print(mathworker._child.pid)")
    pid = int(run_python(code).stdout)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_without_math_verify(tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('No module named math_verify')\n")
    code = ("from oar.verify import is_correct as c\n"
            "print([c('1,200', '1200'), c('2a+2b', '2(a+b)'), c('2a+2b', '2(a+b)'), c('2a + 2b', '2a+2b'), c('3,4', '4,3')])")
    result = run_python(code, PYTHONPATH=str(tmp_path))
    assert result.stdout.strip() == "[True, False, False, True, True]"
    assert result.stderr.count("math-verify cannot be used") == 1 and "pip install math-verify" in result.stderr


def test_warnings_stay_quiet_otherwise():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verdicts() == [True, False]


# ---------------------------------------------------------------------------------------------------------------------
# Hand-made cases and real outputs, where they are

def test_shared_cases(shared):
    with open(shared / "cases" / "verify_cases.jsonl", encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines]
    assert [case["id"] for case in cases if is_correct(case["text"], case["gold"]) != case["right"]] == []


def test_shared_graded_outputs(shared):
    from benchmarks.verify import read_jsonl, truth
    rows = [row for row in read_jsonl(shared / "data" / "graded_dev.jsonl") if truth(row) is not None]
    outcomes = [(truth(row), is_correct(row["text"], row.get("golds") or row["gold"]), bool(row["mv"])) for row in rows]
    assert sum(right == ours for right, ours, _ in outcomes) >= 0.993 * len(outcomes)
    assert sum(ours and not right for right, ours, _ in outcomes) <= sum(mv and not right for right, _, mv in outcomes)
