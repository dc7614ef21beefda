r"""Which characters of a completion are its final answer.  Grading and token segmentation both ask here, so they agree.

1. The last \boxed{} or \fbox{}, by brace matching (also `\boxed 5`).  Boxes joined by "and", "or" or a comma are one
   answer; of \boxed{\boxed{6}} the inner content counts.  A last box left open means that the text was cut: there is no
   answer, and an earlier box must not be paid for it.  After an empty last box only what follows it is read.
2. Else the last `#### ...` line; a "#### Heading" that more text follows is not one.
3. Else the last "answer is ...", "Answer: ..." or "Final Answer" heading.
4. Else the text itself when it is nothing but an answer, or the number or formula that closes its last full sentence,
   unless that sentence hedges ("not", "or", "maybe", a question).

What a model makes up after its answer, from a line "Question:", "Q:", "Problem:", "User:" or "Human:" on, is not read.
Every pattern here is linear in practice: repeats are bounded and no two neighbours match the same characters.
"""
import re
from typing import NamedTuple

from oar.normalise import brace_pairs

MAX_TEXT = 200_000        # characters, from the end, that are searched for an answer


class AnswerSpan(NamedTuple):
    r"""Character offsets of an answer in the raw text: its marker (\boxed{, ####, "answer is") begins at marker_start,
    and text[answer_start:answer_end] is the answer.  A plain statement has no marker: its two starts are the same."""
    marker_start: int
    answer_start: int
    answer_end: int


_MARKER = re.compile(r"\\boxed|\\fbox|####|\banswer\b", re.I)
_RUN_ON = re.compile(r"\n[ \t*#]*(?:Question|Q|Problem|User|Human)[ \t*\d]*:")
# The command, then a brace, the start of a bare argument (`\boxed 5`), or the end of a text that was cut there.
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*(?=[{\d\\(.+-]|[A-Za-z](?![a-z])|$)")
_GAP = r"(?:[\s$~]|\\[()\[\],;: ]|\\q?quad)*"
_JOIN = re.compile(rf"{_GAP}(?:[,;&]|(?:,\s*)?(?:and|or|\\text\{{\s*(?:and|or)\s*\}})){_GAP}")
_BARE = re.compile(r"(?:\\[a-zA-Z]+|\\[^)\]\s]|[^\s{}$\\]|\{[^{}\n]*\})*")
_HASHES = re.compile(r"(?<!#)####(?!#)\s*((?:(?!####)[^\n])*)")
_HEADING = re.compile(r"[\s*_]*(?:\d+[.):]\s*)?[*_]*[A-Za-z]{2,}")
_STATEMENT = re.compile(
    r"\banswer\b(?:"
    r"(?:,?\s+(?:to|for|of|in|then|therefore|thus|should|must|would|will|could|might|may)\b[^\n.:=]{0,60}?)?"
    r"\s+(?:is|are|be|equals)\b|[ *_]{0,4}[:=]|(?:[*_]{2}|(?<=final answer))[*_ \t]*\n)[\s:*_]*", re.I)
_SENTENCE_END = re.compile(r"\n|(?<!\\)[.!?](?=[\s*]|$)")
_DISPLAY = re.compile(r"(?:\$\$|\\\[).{1,400}?(?:\$\$|\\\])", re.S)
_LEAD_IN = re.compile(
    r"(?:[A-Za-z']+\s+){1,12}(?:is|are|equals)\s+"
    r"|(?:(?:therefore|thus|simply|just|exactly|approximately|about|equal to|option|choice|the number)\s+)+", re.I)
_REMARK = re.compile(
    r",?[ \t]{1,3}(?:because|since|which|as|so|hence|therefore)\b"
    r"|,[ \t]{1,3}(?!and\b|or\b|but\b|not\b|maybe\b|if\b|unless\b)[A-Za-z]{2,20}[ \t][a-z]{2}", re.I)
_HEDGE = re.compile(
    r"n't\b|\?|\b(?:not|cannot|never|or|n?either|maybe|perhaps|possibly|might|may|could|if|unless|guess)\b", re.I)
_VALUE = re.compile(
    r"\$[^$\n]{1,200}\$|\\\([^\n]{1,200}?\\\)|(?<![\w.,\\^_{])[-−]?[$€£]?"
    r"(?:\d{1,60} \d{1,60}/\d{1,60}|(?:\d[\d,]{0,60}(?:\.\d{1,60})?|\.\d{1,60})(?:/\d{1,60})?)(?!\d)\s?%?")
_OPENING = re.compile(r"(?:[\s*]|\\?\$|\\[(\[])*")


def find_answer(text: str) -> AnswerSpan | None:
    """Where the final answer stands in the raw text, without blanks around it; None when there is none.

    Outside boxes, math delimiters and bold marks around the answer are left out as well.
    """
    if not isinstance(text, str):
        return None
    offset = max(0, len(text) - MAX_TEXT)
    text = text[offset:]
    if (marker := _MARKER.search(text)) and (run_on := _RUN_ON.search(text, marker.end())):
        text = text[:run_on.start()]
    boxes = _boxes(text)
    if boxes and text[boxes[-1].answer_start:boxes[-1].answer_end].strip():
        marker, start, end = boxes[-1]
    else:
        span = _marked(text, boxes[-1].answer_end) if boxes else _marked(text, 0) or _plain(text)
        if span is None:
            return None
        marker, start, end = span.marker_start, *_undress(text, span.answer_start, span.answer_end)
    answer = text[start:end]
    start, end = end - len(answer.lstrip()), start + len(answer.rstrip())
    return AnswerSpan(offset + min(marker, start), offset + start, offset + end) if start < end else None


def _undress(text: str, start: int, end: int) -> tuple[int, int]:
    start = _OPENING.match(text, start, end).end()
    answer = text[start:end].rstrip("*$ \t\n")
    for closing in (r"\)", r"\]"):
        answer = answer.removesuffix(closing).rstrip("*$ \t\n")
    return start, start + len(answer)


def _boxes(text: str) -> list[AnswerSpan]:
    """The outermost boxes in order, those joined by "and" or a comma as one; an open box is empty, at the text's end."""
    pairs, boxes = brace_pairs(text), []
    for command in _BOX.finditer(text):
        marker, start = command.span()
        if boxes and marker < boxes[-1].answer_end < len(text):
            continue                                                    # inside the box before
        if text.startswith("{", start):
            end = pairs.get(start, len(text))
            start = start + 1 if start in pairs else end
        else:
            end = _BARE.match(text, start).end()
        while (inner := _BOX.match(text, start)) and pairs.get(inner.end(), -2) + 1 == end:
            start, end = inner.end() + 1, end - 1                       # \boxed{\boxed{6}}
        box = AnswerSpan(marker, start, end)
        between = text[boxes[-1].answer_end:marker].lstrip("}") if boxes else ""
        if len(between) <= 60 and _JOIN.fullmatch(between):
            before = boxes.pop()
            if text[before.answer_start:before.answer_end] != text[start:end]:
                box = AnswerSpan(before.marker_start, before.answer_start, end)
        boxes.append(box)
    return boxes


def _marked(text: str, begin: int) -> AnswerSpan | None:
    """The last `#### ...` line from `begin` on that is not a heading, else the last "answer is ..."."""
    written_to = len(text.rstrip())
    for line in reversed(list(_HASHES.finditer(text, begin))):
        is_heading = _HEADING.match(line[1]) and line.end() < written_to
        if not is_heading and not _STATEMENT.search(line[1]):
            return AnswerSpan(line.start(), *_trim(text, *line.span(1)))
    statements = list(_STATEMENT.finditer(text, begin))
    if not statements or _HEDGE.search(statements[-1][0]):
        return None
    marker, start = statements[-1].span()
    if display := _DISPLAY.match(text, start):
        return AnswerSpan(marker, *display.span())
    end = _SENTENCE_END.search(text, start)
    return AnswerSpan(marker, *_trim(text, start, end.start() if end else len(text)))


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    """Leave "therefore", "the sum is" before an answer and remarks ("because ...", ", the only root") after it out."""
    lead_in = _LEAD_IN.match(text, start, end)
    if lead_in and not _HEDGE.search(lead_in[0]):
        start = lead_in.end()
    remark = _REMARK.search(text, start, end)
    return start, remark.start() if remark and remark.start() > start else end


def _plain(text: str) -> AnswerSpan | None:
    """Without any marker: the whole text if it is nothing but an answer, else what closes the last full sentence."""
    end = len(text.rstrip())
    begin = end - len(text[:end].lstrip())
    if 0 < end - begin <= 200 and "\n" not in text[begin:end]:
        words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[a-zA-Z]+(?:\{[a-zA-Z ]*\})?", " ", text[begin:end]))
        is_name = "=" in text[begin:end] or not re.search(r"\d", text[begin:end])
        if len(words) <= (3 if not text[begin].isalpha() else 1 if is_name else 0):
            return AnswerSpan(begin, begin, end)                        # "18 square feet", "Monday", "AB = 5"
    for display in _DISPLAY.finditer(text, max(begin, end - 800)):
        if not text[display.end():end].strip(" .*\n"):
            return AnswerSpan(display.start(), *display.span())
    sentence = max((mark.end() for mark in _SENTENCE_END.finditer(text, begin, max(begin, end - 1))), default=begin)
    values = list(_VALUE.finditer(text, sentence, end))
    if not values or text[end - 1] not in ".!*$)" or _HEDGE.search(text, sentence, end):
        return None
    return AnswerSpan(values[-1].start(), *values[-1].span())


def extract_answer(text: str) -> str | None:
    """The final answer as written, None when there is none: text[answer_start:answer_end] of `find_answer`."""
    span = find_answer(text)
    return text[span.answer_start:span.answer_end] if span else None
