"""Which tokens decide the answer?  Score a correct completion by every method, print, paint and mark the causal tokens.

    python attribute.py                                                # a lab completion, on a CPU, half a minute
    python attribute.py --n 3 --methods oar_p oar_t --probe last --oracle answer
    python attribute.py --problem "x 3 y 5 ; x + 4 ; y * x ; x - y ; y + 1 ?"
    python attribute.py --model Qwen/Qwen2.5-Math-1.5B --problem "What is 12 * 13?"
    python attribute.py --model MODEL --data problems.jsonl --n 5
    python attribute.py --model MODEL --problem "..." --completion-file solution.txt

1. Completions are sampled G to a problem until --n correct ones are there, at most one per problem with --data.  A
   problem given by --problem has no gold answer outside the lab: any completion that answers counts, and the oracle asks
   which tokens would change its own answer.
2. Weights are those of training (oar/credit.py, oar/reshape.py) for a positive advantage of 1.
3. The folder holds index.html (self-contained), completion-N.png and attribution.json.
"""
import dataclasses
import json
import sys
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal, Optional

import torch
from tqdm import tqdm
from transformers import HfArgumentParser

from oar import attribution, credit, data, heatmap, lab, models
from oar.attribution import DEFAULT_METHODS, NEEDS_GROUP
from oar.batch import random_stream
from oar.checkpoint import write_atomically
from oar.errors import UserError, exit_cleanly
from oar.flags import flag, parse_flags
from oar.probe import segment
from oar.rollout import draw_uniforms, sample
from oar.verify import extract_answer, is_correct

MAX_TRIES = 200              # problems sampled before giving up
LAB_TOKENS, REAL_TOKENS = 80, 256


@dataclass
class Config:
    model: str = flag("lab", '"lab", a hub id, a local folder, a run folder or a .gguf file.')
    data: Optional[str] = flag(None, "JSONL file of problems (default in the lab: its test problems).")
    problem: Optional[str] = flag(None, "One problem, in place of --data.")
    completion_file: Optional[str] = flag(None, "Text of a completion to score, in place of sampling (needs --problem).")
    methods: Optional[list[str]] = flag(None, f"Methods to compare (default: {' '.join(DEFAULT_METHODS)}, in the lab also roles).")
    probe: Literal["last", "answer_mean", "answer_joint"] = flag("answer_mean", "What counts as the outcome.")
    perturb: Literal["auto", "mask", "resample", "other"] = flag("auto", "OAR-P, oar_t: what replaces a token (auto: mask for OAR-P, other for oar_t).")
    oracle: Literal["none", "answer", "all"] = flag("all", "Mark causal tokens: decode the answer again, or all that follows.")
    n: int = flag(1, "Completions to show.")
    group_size: int = flag(8, "Completions sampled per problem.")
    max_new_tokens: Optional[int] = flag(None, f"Longest completion (lab: {LAB_TOKENS}, else {REAL_TOKENS}).")
    temperature: float = flag(1.0, "Sampling temperature.")
    seed: int = flag(0, "Seed of problems, sampling and attribution.")
    device: Literal["auto", "cpu", "cuda", "mps"] = flag("auto", "Where to compute.")
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "Compute dtype; the weights stay float32.")
    tokens_per_pass: int = flag(8192, "Tokens per forward: memory only, never the result.")
    trust_remote_code: bool = flag(False, "Run model code from the hub repository.")
    color: Literal["auto", "always", "never"] = flag("auto", "Colours in the terminal (auto: when it is one and NO_COLOR is not set).")
    out: Optional[str] = flag(None, "Folder of the page and pictures (default: runs/attribution-TIME).")
    quiet: bool = flag(False, "No progress bar, no output.")


def check(config: Config, is_lab: bool) -> None:
    """Fill in what depends on the model; UserError for impossible flags."""
    config.max_new_tokens = config.max_new_tokens or (LAB_TOKENS if is_lab else REAL_TOKENS)
    if config.methods is None:
        config.methods = [*DEFAULT_METHODS, "roles"] if is_lab else list(DEFAULT_METHODS)
    config.methods = list(dict.fromkeys(config.methods))
    for method in config.methods:
        if method not in credit.METHODS:
            raise UserError(f"--methods: there is no method {method!r} (there are: {', '.join(credit.METHODS)})")
    if "roles" in config.methods and not is_lab:
        raise UserError("--methods roles: token roles are known in the lab only")
    if config.data and config.problem:
        raise UserError("--problem and --data exclude each other")
    if config.completion_file and not config.problem:
        raise UserError("--completion-file needs the --problem that it answers")
    if config.completion_file and set(config.methods) & set(NEEDS_GROUP):
        raise UserError(f"--methods {' '.join(NEEDS_GROUP)} compares the completions of a group; it cannot score a single file")
    if not is_lab and not config.data and not config.problem:
        raise UserError("name a problem with --problem, or a file of problems with --data")
    if min(config.n, config.group_size, config.max_new_tokens, config.tokens_per_pass) < 1 or not config.temperature > 0:
        raise UserError("--n, --group-size, --max-new-tokens, --tokens-per-pass and --temperature must be positive")


def load_problems(config: Config, is_lab: bool) -> list[data.Example]:
    """Problems in the order they are tried; the answer "" stands for: unknown, accept the completion's own."""
    if config.problem is not None:
        gold = ""
        if is_lab:
            try:
                gold = lab.execute(lab.parse_problem(config.problem))[1]
            except (ValueError, TypeError, KeyError):
                raise UserError('--problem: the lab reads programs such as "x 3 y 5 ; x + 4 ; y * x ?"') from None
        return [data.Example(config.problem, gold, "problem")]
    if config.data:
        return data.read_jsonl(config.data, limit=MAX_TRIES)
    return data.lab_examples("test", MAX_TRIES, lab.INSTRUCTIONS, config.seed)


def accepted(policy, batch, row: int, gold) -> bool:
    """Whether a completion is shown: it marks its answer, that is right (when the gold is known), and reasoning comes first."""
    cut = segment(policy.tokenizer, batch.row_ids(row), policy.eos_ids)
    return cut.answered and cut.reasoning_end > 0 and (not gold or is_correct(batch.texts[row], gold))


def sample_until_enough(policy, config: Config, examples, cast, say) -> list[attribution.Attribution]:
    """Sample problem after problem, score the accepted completions."""
    results = []
    bar = tqdm(total=config.n, desc="correct completions", disable=config.quiet, dynamic_ncols=True)
    settings = credit.CreditConfig(probe=config.probe, perturb=config.perturb)
    for number, example in enumerate(examples):
        if len(results) == config.n:
            break
        uniforms = draw_uniforms(config.group_size, config.max_new_tokens, random_stream(config.seed, number, "rollout"))
        with cast():
            batch = sample(policy, [data.encode_prompt(policy, example.problem)], config.group_size, config.max_new_tokens, uniforms,
                           config.temperature, stop_strings=data.stop_strings(policy))
            rewards = torch.tensor([float(is_correct(text, example.answer or extract_answer(text) or "")) for text in batch.texts])
            rows = [row for row in range(len(batch)) if accepted(policy, batch, row, example.answer)]
            rows = rows[:config.n - len(results) if config.problem else 1]
            if rows:
                results += attribution.attribute_rows(
                    policy, batch, rows, example.problem, [example.answer or None] * len(rows), rewards, config.methods, settings, config.oracle,
                    config.temperature, config.tokens_per_pass, config.max_new_tokens, data.stop_strings(policy), config.seed)
        bar.update(len(rows))
    bar.close()
    if not results:
        raise UserError(f"{config.model} wrote no correct completion for {min(len(examples), MAX_TRIES)} problem(s); try another seed, a lower "
                        "--temperature or a higher --max-new-tokens")
    if len(results) < config.n:
        say(f"{len(results)} of {config.n} correct completions found")
    return results


def read_completion(policy, config: Config, example, cast) -> list[attribution.Attribution]:
    """Score the text of --completion-file; a wrong or unanswered one is scored too, but has no causal tokens."""
    try:
        text = Path(config.completion_file).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--completion-file {config.completion_file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    with cast():
        batch = attribution.batch_of_texts(policy, example.problem, [text])
        return attribution.attribute_rows(policy, batch, [0], example.problem, [example.answer or None], torch.ones(1), config.methods,
                                          credit.CreditConfig(probe=config.probe, perturb=config.perturb), config.oracle, config.temperature,
                                          config.tokens_per_pass, config.max_new_tokens, data.stop_strings(policy), config.seed)


def main() -> None:
    parser = HfArgumentParser(Config, description=__doc__.split("\n")[0], allow_abbrev=False)
    config, = parse_flags(parser, sys.argv[1:])
    say = (lambda *text: None) if config.quiet else partial(print, flush=True)
    device = models.pick_device(config.device)
    cast = partial(models.autocast, device, models.pick_dtype(config.dtype, device))
    policy = models.load(config.model, device, config.trust_remote_code, config.quiet)
    check(config, policy.is_lab)
    examples = load_problems(config, policy.is_lab)
    results = read_completion(policy, config, examples[0], cast) if config.completion_file else sample_until_enough(policy, config, examples, cast, say)

    out = Path(config.out or f"runs/attribution-{datetime.now():%Y%m%d-%H%M%S}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    title = f"Which tokens decide the answer?  {Path(config.model).name}, probe {config.probe}"
    write_atomically(out / "index.html", heatmap.page(results, title, config.oracle))
    write_atomically(out / "attribution.json", json.dumps([dataclasses.asdict(r) for r in results], indent=1) + "\n")
    colours = heatmap.wants_colours(sys.stdout, config.color)
    for number, result in enumerate(results, 1):
        heatmap.picture(result, f"{result.problem[:110]}   answer {result.answer[:30]}", out / f"completion-{number}.png")
        say(heatmap.terminal(result, colours) + "\n")
    marks = "" if config.oracle == "none" else f"; {'underlined' if colours else '*'}: causal, oracle {config.oracle!r}"
    say(("blue below, orange above the weight 1" if colours else "[brackets]: weight 1.25 or more") + marks)
    say(f"folder   {out}   (index.html, attribution.json, {len(results)} picture{'s' * (len(results) > 1)})")


if __name__ == "__main__":
    exit_cleanly(main)
