"""Problems and prompts: the lab, a JSONL file, or a hub data set.

A JSONL line is {"problem": ..., "answer": ...} (other names by flag; "id" and "answers", a list of accepted golds, are
optional).  Files are read line by line as UTF-8, a leading byte-order mark is fine, and every fault is reported with
file, line and field.
"""
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oar import lab
from oar.errors import UserError
from oar.models import Policy
from oar.verify import extract_answer

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
LONGEST_LINE = 2 ** 26               # bytes (64 MiB): a longer line is not a problem but another kind of file
PLAIN_STOPS = ["\nProblem:"]          # a base model likes to invent the next problem; its answer must not be graded
LAB_TEST_PROBLEMS = 200               # of the lab's endless test split, when no limit is given

# The paper's benchmarks on the hub: data set, configuration, split, problem field, answer field.
BENCHMARKS = {
    "gsm8k": ("openai/gsm8k", "main", "test", "question", "answer"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", "problem", "answer"),
    "aime24": ("HuggingFaceH4/aime_2024", None, "train", "problem", "answer"),
    "aime25": ("math-ai/aime25", None, "test", "problem", "answer"),
    "amc23": ("math-ai/amc23", None, "test", "question", "answer"),
    "minerva": ("math-ai/minervamath", None, "test", "question", "answer"),
    "olympiad": ("math-ai/olympiadbench", None, "test", "question", "final_answer"),
}


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
    if any("\ud800" <= character <= "\udfff" for character in str(value)):
        raise UserError(f"{where}: field {name!r} holds half of a surrogate pair, which no tokenizer takes")
    return str(value)


def gold_list(golds, name: str, where: str) -> list[str]:
    """A field that lists the accepted golds, at least one. UserError naming the place and field otherwise."""
    if not isinstance(golds, list) or not golds:
        raise UserError(f"{where}: field {name!r} must be a non-empty list of texts")
    return [field_text({name: gold}, name, where) for gold in golds]


def example_of(row: dict, problem_field: str, answer_field: str, where: str, default_id: str) -> Example:
    """An Example from one record."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with {problem_field!r} and {answer_field!r}, got {type(row).__name__}")
    problem = field_text(row, problem_field, where)
    golds_field = answer_field if isinstance(row.get(answer_field), list) else "answers"
    golds = row.get(golds_field)
    if golds is not None:
        answer = gold_list(golds, golds_field, where)
    else:
        answer = gold_answer(field_text(row, answer_field, where))
    return Example(problem, answer, str(row.get("id", default_id)))


def json_lines(path: str) -> Iterator[tuple[int, object]]:
    """(line number, value) of every line of a JSONL file that is not blank.

    Read line by line, however large the file.  UserError: unreadable file, bytes that are not UTF-8, a line that is not
    JSON or has no end.
    """
    try:
        with open(path, "rb") as file:               # bytes: only "\n" ends a line, U+2028 inside a text does not
            for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
                where = f"{path}, line {number}"
                if len(raw) == LONGEST_LINE and not raw.endswith(b"\n"):
                    raise UserError(f"{where}: longer than {LONGEST_LINE >> 20} MiB")
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                    value = json.loads(text) if text else None
                except UnicodeDecodeError as error:
                    raise UserError(f"{where}: byte {error.start + 1} is not UTF-8") from None
                except RecursionError:
                    raise UserError(f"{where}: not valid JSON (nested too deeply)") from None
                except ValueError as error:          # also an integer of more digits than Python reads
                    raise UserError(f"{where}: not valid JSON ({getattr(error, 'msg', error)})") from None
                if text:
                    yield number, value
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def read_jsonl(path: str, problem_field: str = "problem", answer_field: str = "answer", limit: int | None = None) -> list[Example]:
    """Examples of a JSONL file, at most `limit`; blank lines are skipped.

    UserError: what `json_lines` finds, a line that is no object, a missing, empty or non-text field, a duplicate id, or
    no problem at all.
    """
    examples: list[Example] = []
    seen: dict[str, int] = {}
    for number, row in json_lines(path):
        where = f"{path}, line {number}"
        example = example_of(row, problem_field, answer_field, where, f"{Path(path).stem}-{number}")
        if example.id in seen:
            raise UserError(f"{where}: field 'id' repeats {example.id!r} of line {seen[example.id]}")
        seen[example.id] = number
        examples.append(example)
        if limit is not None and len(examples) >= limit:
            break
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


def read_benchmark(source: str, problem_field: str | None, answer_field: str, split: str, config: str | None, instructions: int,
                   limit: int | None) -> tuple[str, list[Example]]:
    """(name, the first `limit` problems) of "lab" (its test split), one of BENCHMARKS, a JSONL file or a hub id.

    The fields, split and configuration are for files and hub ids: BENCHMARKS brings its own, also when named by hub id.
    UserError for an unknown name, a faulty file, a hub out of reach, or two problems with one id.
    """
    name = {row[0]: name for name, row in BENCHMARKS.items()}.get(source, source)
    if source == "lab":
        examples = lab_examples("test", limit or LAB_TEST_PROBLEMS, instructions, 0)
    elif name in BENCHMARKS:
        hub_id, config, split, problem_field, answer_field = BENCHMARKS[name]
        examples = read_hub(hub_id, split, problem_field, answer_field, config, limit)
    elif Path(source).exists() or Path(source).suffix in (".jsonl", ".json"):
        name = Path(source).stem
        examples = read_jsonl(source, problem_field or "problem", answer_field, limit)
    elif re.fullmatch(r"\w[\w.-]*/[\w.-]+", source):
        examples = read_hub(source, split, problem_field or "question", answer_field, config, limit)
    else:
        raise UserError(f"--data {source}: no such file, and not one of lab, {', '.join(BENCHMARKS)} or a hub id (owner/name)")
    if len({example.id for example in examples}) < len(examples):
        raise UserError(f"--data {source}: two problems have the same id")
    return name, examples


def read_outputs(path: str) -> list[dict]:
    """Outputs to grade, as {"line", "benchmark", "gold" (text or list), "text", "label" (bool or None)}.

    A line is {"gold": text or "golds": list, "text": ...} with optional "benchmark" (default: the file's name) and "label"
    (0, 1, false, true).  UserError naming file, line and field.
    """
    outputs = []
    for number, row in json_lines(path):
        where = f"{path}, line {number}"
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected an object with 'gold' and 'text', got {type(row).__name__}")
        gold = gold_list(row["golds"], "golds", where) if row.get("golds") is not None else field_text(row, "gold", where)
        if not isinstance(row.get("text"), str):
            raise UserError(f"{where}: field 'text' must be text" if "text" in row else f"{where}: no field 'text'")
        label = row.get("label")
        if label is not None and (not isinstance(label, (bool, int, float)) or label not in (0, 1)):
            raise UserError(f"{where}: field 'label' must be 0, 1, false or true, not {json.dumps(label)[:40]}")
        benchmark = field_text(row, "benchmark", where) if row.get("benchmark") is not None else Path(path).stem
        outputs.append({"line": number, "benchmark": benchmark, "gold": gold, "text": row["text"],
                        "label": None if label is None else bool(label)})
    if not outputs:
        raise UserError(f"{path}: holds no outputs")
    return outputs


def prompt(policy: Policy, problem: str) -> str | list[dict]:
    """The lab's bare program, a conversation when there is a chat template, else a plain step-by-step text."""
    if policy.is_lab:
        return problem
    if policy.tokenizer.chat_template:
        return [{"role": "user", "content": f"{problem}\n{INSTRUCTION}"}]
    return f"Problem: {problem}\n{INSTRUCTION}\nSolution:"


def encode_prompt(policy: Policy, problem: str) -> list[int]:
    """Token ids of `prompt`, up to where the completion begins."""
    tokenizer, text = policy.tokenizer, prompt(policy, problem)
    if isinstance(text, list):
        return tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=True, return_dict=False)
    return tokenizer.encode(text, add_special_tokens=not policy.is_lab)


def stop_strings(policy: Policy) -> list[str]:
    """Texts that end a completion besides EOS: only the plain template needs them."""
    return [] if policy.is_lab or policy.tokenizer.chat_template else PLAIN_STOPS
