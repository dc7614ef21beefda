"""Evaluate policies on benchmarks: sample n completions per problem, grade them, print P@1 and pass@k with intervals.

    python evaluate.py                                                 # the lab's warm-start policy: no download, 1 minute
    python evaluate.py --temperature 0                                 # greedy: one completion per problem
    python evaluate.py --model lab runs/NAME                           # a training run against its start, paired
    python evaluate.py --model Qwen/Qwen2.5-Math-1.5B --data math500 aime24 amc23 --samples 8 --k 1 4 8
    python evaluate.py --model RUN_OR_MODEL --data problems.jsonl --limit 50
    python evaluate.py --grade outputs.jsonl                           # grade existing outputs, no model

1. completions.jsonl is the record: one line per completion with its verdict.  The same command finds its folder again and
   goes on where it was stopped; a folder whose settings differ is refused.
2. A completion depends on (seed, problem id, sample number) only, never on batch, --limit or interruption (up to rounding:
   sums in another order can turn a token that hangs by the last digit).  Models get the same random numbers.
3. A prompt that leaves no room for --max-new-tokens in the model's context is counted and left out, never cut.
4. The figures and their intervals are defined in oar/evaluation.py, grading in oar/verify.py.
"""
import dataclasses
import hashlib
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Optional

import torch
from tqdm import tqdm
from transformers import HfArgumentParser

from oar import checkpoint, data, evaluation, interrupt, lab, lock, models
from oar.batch import for_chunks, random_stream
from oar.data import BENCHMARKS, LAB_TEST_PROBLEMS
from oar.errors import UserError, exit_cleanly
from oar.flags import flag, parse_flags
from oar.rollout import draw_uniforms, sample
from oar.verify import extract_answer, is_correct

# Defaults that depend on the model; each is overridden by its flag.
PRESETS = {
    "lab": dict(data=["lab"], samples=8, max_new_tokens=80, batch_size=256),
    "real": dict(data=["gsm8k"], samples=1, max_new_tokens=1024, batch_size=32),
}
NOT_SETTINGS = ("k", "batch_size", "grade", "out", "quiet")      # flags that may differ when a folder is continued


@dataclass
class Config:
    """Everything an evaluation depends on; saved as config.json.  Flags left at None take a default that fits the others."""
    model: list[str] = flag(["lab"], '"lab", run folders, hub ids, local folders, .gguf files; the first is the one to compare with.')
    data: Optional[list[str]] = flag(None, f'"lab", {", ".join(BENCHMARKS)}, JSONL files or hub ids (default: lab or gsm8k).')
    samples: Optional[int] = flag(None, "Completions per problem (default: 8 in the lab, else 1).")
    k: Optional[list[int]] = flag(None, "The k of pass@k (default: 1 and --samples).")
    temperature: Optional[float] = flag(None, "0 is greedy: one completion per problem (default: 0 for one sample, else 1).")
    top_p: float = flag(1.0, "Sample from the smallest set of tokens with this much probability.")
    max_new_tokens: Optional[int] = flag(None, "Longest completion (default: 80 in the lab, else 1024).")
    limit: Optional[int] = flag(None, f"Use the first so many problems of each benchmark (lab: {LAB_TEST_PROBLEMS}, else all).")
    seed: int = flag(0, "Seed of sampling and of the bootstrap.")
    problem_field: Optional[str] = flag(None, "Field that holds the problem (JSONL: problem, hub id: question).")
    answer_field: str = flag("answer", "Field that holds the answer.")
    data_split: str = flag("test", "Split of a data set given by hub id.")
    data_config: Optional[str] = flag(None, "Configuration of a data set given by hub id.")
    instructions: int = flag(lab.INSTRUCTIONS, "Lab: instructions per program.")
    device: Literal["auto", "cpu", "cuda", "mps"] = flag("auto", "Where to compute.")
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "Compute dtype.")
    trust_remote_code: bool = flag(False, "Run model code from the hub repository.")

    batch_size: Optional[int] = flag(None, "Completions decoded together: memory and speed only; halved when memory runs out.")
    grade: Optional[str] = flag(None, 'Grade this JSONL file instead: {"gold" or "golds", "text", optionally "benchmark", "label"}.')
    out: Optional[str] = flag(None, "Output folder (default: a name under runs/ made from the settings).")
    quiet: bool = flag(False, "No progress bar.")


# --------------------------------------------------------------------------------------------------------------------
# configuration

def check(config: Config) -> None:
    """UserError for values that are impossible, alone or together; flags still at None are passed over."""
    checks = [(name, getattr(config, name) is None or getattr(config, name) > 0, "positive")
              for name in ("samples", "max_new_tokens", "limit", "batch_size", "instructions")]
    checks += [("temperature", config.temperature is None or 0 <= config.temperature < math.inf, "at least 0"),
               ("top_p", 0 < config.top_p <= 1, "above 0 and at most 1"), ("seed", config.seed >= 0, "at least 0"),
               ("k", min(config.k or [1]) > 0, "positive"), ("model", len({*config.model}) == len(config.model), "given once each")]
    for name, fine, want in checks:
        if not fine:
            raise UserError(f"--{name.replace('_', '-')} must be {want}, got {getattr(config, name)}")
    if config.k and max(config.k) > 1 and config.temperature == 0:
        raise UserError(f"--k {max(config.k)} needs different completions of a problem, and greedy decoding (temperature 0) has one")
    if config.k and config.samples is not None and max(config.k) > config.samples:
        raise UserError(f"--k {max(config.k)} needs at least {max(config.k)} samples per problem, and --samples is {config.samples}")


def resolve(config: Config, is_lab: bool, device: torch.device) -> None:
    """Fill in the flags left at None or "auto", and check them again."""
    if config.temperature == 0:
        config.samples = 1
    for name, value in PRESETS["lab" if is_lab else "real"].items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    if config.temperature is None:
        config.temperature = 0.0 if config.samples == 1 else 1.0
    config.device, config.dtype = device.type, str(models.pick_dtype(config.dtype, device)).removeprefix("torch.")
    check(config)
    config.k = sorted(set(config.k or [1, config.samples]))


def digest(value) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=4).hexdigest()


def settings_of(config: Config, benchmarks: dict[str, list[data.Example]]) -> dict:
    """What decides the completions: the flags, the problems, and (by size and time) the weights if they are on this disk."""
    weights = {}
    for name in config.model:
        folder, options = models.locate(name)
        files = sorted(f for f in Path(folder).glob(options.get("gguf_file", "*")) if f.suffix in (".gguf", ".safetensors", ".bin"))
        weights[name] = digest([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files])
    problems = {name: digest([dataclasses.astuple(example) for example in examples]) for name, examples in benchmarks.items()}
    flags = {name: value for name, value in dataclasses.asdict(config).items() if name not in NOT_SETTINGS}
    return {**flags, "weights": weights, "problems": problems}


def folder_of(config: Config, settings: dict) -> Path:
    name = re.sub(r"[^A-Za-z0-9.]+", "-", config.model[0])[-40:].strip("-.")
    return Path(config.out or f"runs/eval-{name}-{digest(settings)}")


def open_folder(out: Path, settings: dict) -> None:
    """Make the output folder ready, new or to be continued; a last line cut short by a kill is dropped.

    UserError when its settings differ, naming the first that does, or when it holds something else.
    """
    record, saved = out / "completions.jsonl", None
    try:
        if (out / "config.json").exists():
            saved = dict(json.loads((out / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--out {out}: {error}") from None
    if saved is None and record.exists():
        raise UserError(f"--out {out}: holds completions.jsonl but no config.json to say how they were made")
    for name, value in settings.items() if saved is not None else ():
        if saved.get(name) != value:
            raise UserError(f"--out {out}: {name.replace('_', '-')} is {saved.get(name)!r} in this folder, not {value!r}")
    checkpoint.write_atomically(out / "config.json", json.dumps(settings, indent=2) + "\n")
    if record.exists():
        drop_cut_line(record)


def drop_cut_line(record: Path) -> None:
    """Take away a last line that a kill or a full disk has cut short."""
    os.truncate(record, record.read_bytes().rfind(b"\n") + 1)


# --------------------------------------------------------------------------------------------------------------------
# benchmarks and completions

def load_benchmarks(config: Config) -> dict[str, list[data.Example]]:
    """Problems by benchmark name, in the order of --data."""
    benchmarks = {}
    for source in config.data:
        name, examples = data.read_benchmark(source, config.problem_field, config.answer_field, config.data_split, config.data_config,
                                             config.instructions, config.limit)
        if name in benchmarks or name == evaluation.OVERALL:
            raise UserError(f"--data {source}: the name {name!r} is taken; rename the file")
        benchmarks[name] = examples
    return benchmarks


def check_language(name: str, policy: models.Policy, benchmarks: dict[str, list[data.Example]]) -> None:
    """UserError when the lab's policy meets problems it has no words for, or another model the lab's bare programs."""
    for benchmark, examples in benchmarks.items():
        if policy.is_lab != all(set(example.problem.split()) <= set(lab.VOCABULARY) for example in examples):
            raise UserError(f"--model {name} with {benchmark}: the lab's policies and the lab's problems go together only")


def fitting_prompts(policy: models.Policy, examples: list[data.Example], max_new_tokens: int) -> list[tuple[data.Example, list[int]]]:
    """(problem, prompt ids) of those that leave room for a whole completion, longest prompt first."""
    room = models.prompt_room(policy, max_new_tokens)
    prompts = [(example, data.encode_prompt(policy, example.problem)) for example in examples]
    return sorted([pair for pair in prompts if len(pair[1]) <= room], key=lambda pair: -len(pair[1]))


def complete(policy: models.Policy, todo: list[tuple], config: Config, bar: tqdm, save) -> None:
    """Sample and grade every (problem, prompt ids, sample number) of `todo`; `save` gets one record each, in this order.

    Neighbours are alike in length, so little is padded, and the order of the records does not depend on the batch size.
    """
    def run(rows: list[int]) -> None:
        start, batch_todo = bar.n, [todo[row] for row in rows]
        uniforms = torch.cat([draw_uniforms(1, config.max_new_tokens, random_stream(config.seed, e.id, n)) for e, _, n in batch_todo])

        def show(live: int) -> None:                 # a finished row counts at once, though its batch goes on
            bar.set_postfix_str(f"{live} being written", refresh=False)
            bar.update(start + len(rows) - live - bar.n)

        try:
            with models.autocast(policy.model.device, getattr(torch, config.dtype)):
                batch = sample(policy, [prompt for _, prompt, _ in batch_todo], 1, config.max_new_tokens, uniforms, config.temperature,
                               config.top_p, data.stop_strings(policy), progress=show)
        except RuntimeError:
            show(len(rows))                          # perhaps out of memory: for_chunks sends these rows again
            raise
        for row, ((example, _, number), text) in enumerate(zip(batch_todo, batch.texts)):
            save({"id": example.id, "sample": number, "correct": is_correct(text, example.answer), "answer": extract_answer(text),
                  "golds" if isinstance(example.answer, list) else "gold": example.answer,
                  "tokens": int(batch.completion_mask[row].sum()), "finished": bool(batch.finished[row]), "text": text})
        show(0)

    for_chunks([1] * len(todo), config.batch_size, run)


def evaluate_model(name: str, policy: models.Policy, benchmarks: dict, config: Config, out: Path) -> tuple[list[dict], dict]:
    """Complete what the record lacks; then this model's rows of the table and its rates by benchmark and problem."""
    file = out / "completions.jsonl"
    try:
        done = {(r["model"], r["benchmark"], r["id"], r["sample"]): r for r in checkpoint.read_records(file)}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file}: holds a line that is not a completion of this program") from None
    wanted, todo = {}, {}
    for benchmark, examples in benchmarks.items():
        wanted[benchmark] = [(e, prompt, n) for e, prompt in fitting_prompts(policy, examples, config.max_new_tokens) for n in range(config.samples)]
        todo[benchmark] = [(e, prompt, n) for e, prompt, n in wanted[benchmark] if (name, benchmark, e.id, n) not in done]
        if not wanted[benchmark]:
            raise UserError(f"--max-new-tokens {config.max_new_tokens}: no prompt of {benchmark} leaves room for it in the context of {name}")
    total = sum(map(len, wanted.values()))
    bar = tqdm(total=total, initial=total - sum(map(len, todo.values())), desc=evaluation.short(name, 24), unit="completion",
               smoothing=0, miniters=0, disable=config.quiet, dynamic_ncols=True)
    rows, rates = [], {}
    for benchmark in benchmarks:
        def save(record: dict) -> None:
            record = {"model": name, "benchmark": benchmark, **record}
            checkpoint.append_jsonl(file, record)
            done[name, benchmark, record["id"], record["sample"]] = record

        complete(policy, todo[benchmark], config, bar, save)
        records = [done[name, benchmark, e.id, n] for e, _, n in wanted[benchmark]]
        rates[benchmark] = evaluation.problem_rates(records)
        rows.append({"model": name, "benchmark": benchmark, "skipped": len(benchmarks[benchmark]) - len(rates[benchmark]),
                     **evaluation.benchmark_row(records, config.samples, config.k)})
    bar.close()
    return [*rows, evaluation.overall_row(rows)], rates


# --------------------------------------------------------------------------------------------------------------------
# commands

def grade(config: Config) -> None:
    """Grade the lines of a file: a verdict per line in verdicts.jsonl, a table with the confusion against the labels.

    Verdicts are gathered in a file named after the lines' hash, where an interrupted grading is taken up again.
    """
    outputs = data.read_outputs(config.grade)
    out = Path(config.out or f"runs/grade-{Path(config.grade).stem}")
    if (out / "config.json").exists():
        raise UserError(f"--out {out}: holds a run; give the verdicts a folder of their own")
    with lock.hold(out):
        unfinished = out / f"grading-{digest(outputs)}.jsonl"
        if unfinished.exists():
            drop_cut_line(unfinished)
        done = len(checkpoint.read_records(unfinished))
        for output in tqdm(outputs[done:], desc="grade", unit=" lines", initial=done, total=len(outputs), disable=config.quiet, dynamic_ncols=True):
            answer = extract_answer(output["text"])
            answer = answer and answer.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair cannot be written
            checkpoint.append_jsonl(unfinished, {name: output[name] for name in ("line", "benchmark", "label")}
                                    | {"correct": is_correct(output["text"], output["gold"]), "answer": answer})
        verdicts = checkpoint.read_records(unfinished)
        checkpoint.sync(unfinished)
        os.replace(unfinished, out / "verdicts.jsonl")
        report_grades(config, verdicts, out)


def report_grades(config: Config, verdicts: list[dict], out: Path) -> None:
    """Tables of the verdicts, by benchmark and over all lines."""
    groups = {name: [v for v in verdicts if v["benchmark"] == name] for name in dict.fromkeys(v["benchmark"] for v in verdicts)}
    groups |= {"all lines": verdicts} if len(groups) > 1 else {}
    rows = [{"benchmark": name, **evaluation.confusion(group)} for name, group in groups.items()]
    report(out, {"file": config.grade}, {"results": rows}, [evaluation.confusion_table(rows)], "verdicts.jsonl")


def report(out: Path, settings: dict, results: dict, tables: list[str], record: str) -> None:
    """Print the tables, and write them to results.md and all figures to results.json."""
    lines = [f"- {name}: {evaluation.printable(json.dumps(value))}" for name, value in settings.items()]
    notes = "Figures and intervals are defined in oar/evaluation.py."
    checkpoint.write_atomically(out / "results.md", "\n".join(["# Results", "", *lines, "", "\n\n".join(tables), "", notes]) + "\n")
    checkpoint.write_atomically(out / "results.json", json.dumps({"settings": settings, **results}, indent=2) + "\n")
    print("\n" + "\n\n".join(tables) + f"\n\noutput folder  {out}   ({record}, results.json, results.md)", flush=True)


def main() -> None:
    config, = parse_flags(HfArgumentParser(Config, description=__doc__.split("\n")[0], allow_abbrev=False), sys.argv[1:])
    check(config)
    if config.grade:
        return grade(config)
    for name in config.model:
        models.locate(name)                          # a wrong path shows now, not after the models before it
    device = models.pick_device(config.device)
    load = partial(models.load, device=device, trust_remote_code=config.trust_remote_code, quiet=config.quiet)
    policy = load(config.model[0])
    resolve(config, policy.is_lab, device)
    benchmarks = load_benchmarks(config)
    check_language(config.model[0], policy, benchmarks)
    settings = settings_of(config, benchmarks)
    out = folder_of(config, settings)
    with lock.hold(out):
        evaluate(config, policy, load, benchmarks, settings, out)


def evaluate(config: Config, policy: models.Policy, load, benchmarks: dict[str, list[data.Example]], settings: dict, out: Path) -> None:
    """Every model on every benchmark, then the tables; `policy` is the first of them, loaded already."""
    open_folder(out, settings)
    decoding = "greedy" if config.temperature == 0 else f"temperature {config.temperature:g}, top-p {config.top_p:g}, seed {config.seed}"
    print(f"{', '.join(f'{len(some)} {name}' for name, some in benchmarks.items())} problems x {config.samples} completions of up to "
          f"{config.max_new_tokens} tokens, {decoding} ({config.device}, {config.dtype})", flush=True)

    rows, rates = [], {}
    for name in config.model:
        policy = policy or load(name)
        check_language(name, policy, benchmarks)
        more, rates[name] = evaluate_model(name, policy, benchmarks, config, out)
        rows, policy = rows + more, None
    first, *others = config.model
    comparison = [{"model": name, "first": first, **row} for name in others
                  for row in evaluation.compare(rates[first], rates[name], config.seed)]
    tables = [evaluation.results_table(rows)] + ([evaluation.comparison_table(comparison)] if comparison else [])
    report(out, settings, {"results": rows, "comparison": comparison}, tables, "completions.jsonl")


if __name__ == "__main__":
    with interrupt.at_once("stopped; the same command takes it up again from here"):
        exit_cleanly(main)
