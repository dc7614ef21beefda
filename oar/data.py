"""Problems and prompts: the lab, a JSONL file, or a hub data set.

A JSONL line is {"problem": ..., "answer": ...} (other names by flag; "id" and "answers", a list of accepted golds, are
optional).  Files are read line by line as UTF-8, a leading byte-order mark is fine, and every fault is reported with
file, line and field.
"""
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from oar import lab
from oar.errors import UserError
from oar.models import Policy
from oar.verify import extract_answer

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
PLAIN_TEMPLATE = "Problem: {problem}\n" + INSTRUCTION + "\nSolution:"
PLAIN_STOPS = ["\nProblem:"]          # a base model likes to invent the next problem; its answer must not be graded


@dataclass
class Example:
    """One problem, its gold answer (or accepted alternatives) and a stable id."""
    problem: str
    answer: str | list[str]
    id: str


def lab_examples(split: str, count: int, instructions: int, seed: int) -> list[Example]:
    """`count` lab problems of a split ("train", "validation" or "test"); splits never share a problem."""
    rng = random.Random(f"{split}-{seed}")
    problems = [lab.random_problem(rng, instructions, split) for _ in range(count)]
    return [Example(p.text(), lab.execute(p)[1], f"lab-{split}-{i:05d}") for i, p in enumerate(problems)]


def gold_answer(value: str) -> str:
    """The answer inside a worked solution (GSM8K's "#### n", MATH's \\boxed{}), or the text itself."""
    if "####" in value or "\\boxed" in value:
        return extract_answer(value) or value.strip()
    return value.strip()


def field_text(row: dict, name: str, where: str) -> str:
    """A non-empty text field, numbers read as text. UserError naming the place and field otherwise."""
    if name not in row:
        raise UserError(f"{where}: no field {name!r} (there are: {', '.join(map(repr, row)) or 'none'})")
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UserError(f"{where}: field {name!r} must be text, not {json.dumps(value)[:40]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: field {name!r} is not a finite number")
    if not str(value).strip():
        raise UserError(f"{where}: field {name!r} is empty")
    return str(value)


def example_of(row: dict, problem_field: str, answer_field: str, where: str, default_id: str) -> Example:
    """An Example from one record."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with {problem_field!r} and {answer_field!r}, got {type(row).__name__}")
    problem = field_text(row, problem_field, where)
    golds = row.get("answers")
    if golds is not None:
        if not isinstance(golds, list) or not golds:
            raise UserError(f"{where}: field 'answers' must be a non-empty list of texts")
        answer = [field_text({"answers": gold}, "answers", where) for gold in golds]
    else:
        answer = gold_answer(field_text(row, answer_field, where))
    return Example(problem, answer, str(row.get("id", default_id)))


def read_jsonl(path: str, problem_field: str = "problem", answer_field: str = "answer", limit: int | None = None) -> list[Example]:
    """Examples of a JSONL file, at most `limit`; blank lines are skipped.

    UserError: unreadable file, bytes that are not UTF-8, a line that is no JSON object, a missing, empty or non-text
    field, a duplicate id, or no problem at all.
    """
    examples: list[Example] = []
    seen: dict[str, int] = {}
    try:
        with open(path, "rb") as lines:              # bytes: only "\n" ends a line, U+2028 inside a text does not
            for number, raw in enumerate(lines, 1):
                where = f"{path}, line {number}"
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                    row = json.loads(text) if text else None
                except UnicodeDecodeError as error:
                    raise UserError(f"{where}: byte {error.start + 1} is not UTF-8") from None
                except (json.JSONDecodeError, RecursionError) as error:
                    raise UserError(f"{where}: not valid JSON ({getattr(error, 'msg', 'nested too deeply')})") from None
                if not text:
                    continue
                example = example_of(row, problem_field, answer_field, where, f"{Path(path).stem}-{number}")
                if example.id in seen:
                    raise UserError(f"{where}: field 'id' repeats {example.id!r} of line {seen[example.id]}")
                seen[example.id] = number
                examples.append(example)
                if limit is not None and len(examples) >= limit:
                    break
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if not examples:
        raise UserError(f"{path}: holds no problems")
    return examples


def read_hub(name: str, split: str, problem_field: str, answer_field: str, config: str | None = None,
             limit: int | None = None) -> list[Example]:
    """Examples of a hub data set. UserError when `datasets` is missing or the hub cannot be reached."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"--data {name}: reading a hub data set needs the package datasets (pip install datasets)") from None
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:                       # the library raises many kinds, also for a plain lack of network
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"--data {name}: not on this disk and the hub gave: {why}") from None
    rows = rows.select(range(min(limit, len(rows)))) if limit is not None else rows
    return [example_of(row, problem_field, answer_field, f"{name}, row {i}", f"{name}-{split}-{i}") for i, row in enumerate(rows)]


def encode_prompt(policy: Policy, problem: str) -> list[int]:
    """Prompt token ids: the lab's bare program, the chat template when there is one, else a plain step-by-step template."""
    tokenizer = policy.tokenizer
    if policy.is_lab:
        return tokenizer.encode(problem, add_special_tokens=False)
    if tokenizer.chat_template:
        message = [{"role": "user", "content": f"{problem}\n{INSTRUCTION}"}]
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    return tokenizer.encode(PLAIN_TEMPLATE.format(problem=problem))


def stop_strings(policy: Policy) -> list[str]:
    """Texts that end a completion besides EOS: only the plain template needs them."""
    return [] if policy.is_lab or policy.tokenizer.chat_template else PLAIN_STOPS
