"""Train a policy with GRPO and outcome-grounded credit: sample -> verify -> advantages -> importance -> reshape -> update.

    python train.py                                                    # the lab, oar_g, on a CPU: no download, 2 minutes
    python train.py --method oar_p --steps 100 --seed 1
    python train.py --method oar_g --model Qwen/Qwen2.5-Math-1.5B      # a real model on the hub's GSM8K
    python train.py --resume runs/NAME                                 # go on after an interruption

The loop is the paper's algorithm box.  What it leaves out, on purpose:

1. No trainer class, no distributed code: one process, one device.
2. No KL to a reference model unless --kl-beta is set.
3. No separate sampler engine: oar/rollout.py decodes with the policy itself, so old and new log-probabilities are the
   same numbers on the first inner epoch.
4. No global random state: every random number belongs to (seed, step, purpose), which makes resuming exact.
"""
import dataclasses
import json
import random
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal, Optional

import torch
from tqdm import tqdm
from transformers import HfArgumentParser

from oar import checkpoint, data, grpo, lab, metrics, models, plots, record
from oar.batch import random_stream
from oar.credit import CreditConfig, assign_credit
from oar.errors import UserError, exit_cleanly
from oar.flags import flag, parse_flags
from oar.rollout import draw_uniforms, sample
from oar.verify import is_correct

# Defaults that depend on the model; each is overridden by its flag and printed at the start.
PRESETS = {
    "lab": dict(data="lab", steps=60, prompts_per_step=8, group_size=8, max_new_tokens=80, lr=1e-4, validation_size=256,
                eval_every=20, tokens_per_pass=32768),
    "real": dict(data="openai/gsm8k", steps=200, prompts_per_step=16, group_size=8, max_new_tokens=1024, lr=1e-6,
                 validation_size=100, eval_every=0, tokens_per_pass=8192),
}
SAMPLES_EVERY = 10       # steps between entries of samples.jsonl
VALIDATION_ROWS = 128    # validation completions decoded together


@dataclass
class Config(CreditConfig):
    """Everything a run depends on; saved as config.json.  Flags left at None take the preset of the model."""
    model: str = flag("lab", '"lab", a hub id, a local folder, a run folder or a .gguf file.')
    data: Optional[str] = flag(None, '"lab", a JSONL file or a hub data set.')
    data_config: Optional[str] = flag("main", "Configuration of the hub data set.")
    data_split: str = flag("train", "Split of the hub data set.")
    problem_field: Optional[str] = flag(None, "Field that holds the problem (JSONL: problem, hub: question).")
    answer_field: str = flag("answer", "Field that holds the answer.")
    instructions: int = flag(lab.INSTRUCTIONS, "Lab: instructions per program.")

    steps: Optional[int] = flag(None, "Optimisation steps.")
    prompts_per_step: Optional[int] = flag(None, "Problems per step.")
    group_size: Optional[int] = flag(None, "Completions per problem (G).")
    max_new_tokens: Optional[int] = flag(None, "Longest completion.")
    temperature: float = flag(1.0, "Sampling temperature, also of the log-probabilities in the loss.")

    lr: Optional[float] = flag(None, "Learning rate of AdamW.")
    weight_decay: float = flag(0.0, "Weight decay of AdamW.")
    inner_epochs: int = flag(1, "Optimiser steps per rollout, against fixed old log-probabilities.")
    clip_low: float = flag(0.2, "Lower clip range of the ratio.")
    clip_high: float = flag(0.2, "Upper clip range of the ratio.")
    loss_norm: Literal["sequence", "token", "constant"] = flag("sequence", "How token losses are averaged (oar/grpo.py).")
    kl_beta: float = flag(0.0, "Weight of the KL to the frozen initial policy; 0 keeps no reference.")
    max_grad_norm: float = flag(1.0, "Gradient clipping.")

    device: Literal["auto", "cpu", "cuda", "mps"] = flag("auto", "Where to compute.")
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "Compute dtype; the weights stay float32.")
    tokens_per_pass: Optional[int] = flag(None, "Tokens per forward in attribution and update: memory only, never the result.")
    gradient_checkpointing: bool = flag(False, "Recompute activations in the backward pass to save memory.")
    trust_remote_code: bool = flag(False, "Run model code from the hub repository.")

    validation_size: Optional[int] = flag(None, "Held-out problems scored before and after training; 0 for none.")
    eval_every: Optional[int] = flag(None, "Steps between validations in between; 0 for none.")
    save_every: int = flag(20, "Steps between checkpoints (the last step is always saved).")
    seed: int = flag(0, "Seed of data order, sampling and attribution noise.")
    out: Optional[str] = flag(None, "Run folder (default: runs/METHOD-TIME).")


@dataclass
class Session:
    """Flags about this process rather than the run."""
    resume: Optional[str] = flag(None, "Run folder to continue; other flags must repeat its config or be left out.")
    quiet: bool = flag(False, "No progress bar, no tables.")


# --------------------------------------------------------------------------------------------------------------------
# configuration

def parse_config(argv: list[str]) -> tuple[Config, Session, Path]:
    """Flags -> (resolved config, session, run folder). UserError for impossible or contradictory values."""
    parser = HfArgumentParser((Config, Session), description=__doc__.split("\n")[0], allow_abbrev=False)
    config, session = parse_flags(parser, argv)
    if session.resume:
        run = Path(session.resume)
        try:
            saved = json.loads((run / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"--resume {run}: cannot read its config.json ({error})") from None
        parser.set_defaults(**saved)
        config, session = parse_flags(parser, argv)
        for name, value in dataclasses.asdict(config).items():
            if value != saved.get(name, value):
                raise UserError(f"--resume {run}: --{name.replace('_', '-')} is {saved[name]!r} in this run, not {value!r}")
        return config, session, run
    run = Path(config.out or f"runs/{config.method}-{datetime.now():%Y%m%d-%H%M%S}")
    if (run / "config.json").exists():
        raise UserError(f"--out {run}: holds a run already; continue it with --resume {run}")
    return config, session, run


def apply_preset(config: Config, is_lab: bool) -> None:
    """Fill in the flags left at None, then check every range."""
    for name, value in PRESETS["lab" if is_lab else "real"].items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    if config.problem_field is None:
        config.problem_field = "problem" if config.data == "lab" or Path(config.data).suffix in (".jsonl", ".json") else "question"
    if is_lab != (config.data == "lab"):
        raise UserError(f"--model {config.model} with --data {config.data}: the lab's policy and the lab's problems go together only")
    if config.method == "roles" and not is_lab:
        raise UserError("--method roles: token roles are known in the lab only")
    positive = ["steps", "prompts_per_step", "max_new_tokens", "temperature", "lr", "inner_epochs", "max_grad_norm", "tokens_per_pass",
                "noise_std", "noise_draws", "fisher_samples", "save_every", "instructions"]
    not_negative = ["kl_beta", "weight_decay", "clip_low", "clip_high", "boost", "validation_size", "eval_every"]
    checks = [(name, getattr(config, name) > 0, "positive") for name in positive]
    checks += [(name, getattr(config, name) >= 0, "at least 0") for name in not_negative]
    checks += [(name, 0 <= getattr(config, name) <= 1, "between 0 and 1") for name in ("threshold", "floor")]
    checks += [("group_size", config.group_size >= 2, "at least 2 (advantages compare completions of one problem)")]
    for name, fine, want in checks:
        if not fine:
            raise UserError(f"--{name.replace('_', '-')} must be {want}, got {getattr(config, name)}")


# --------------------------------------------------------------------------------------------------------------------
# data and validation

def load_examples(config: Config, policy: models.Policy) -> tuple[list[data.Example], list[data.Example], str]:
    """(training problems, held-out validation problems, a note); problems that do not fit the context are left out."""
    if config.data == "lab":
        examples = data.lab_examples("train", config.steps * config.prompts_per_step, config.instructions, config.seed)
        held_out = data.lab_examples("validation", config.validation_size, config.instructions, 0)
        return examples, held_out, f"{len(examples)} lab problems"
    if Path(config.data).suffix in (".jsonl", ".json") or Path(config.data).exists():
        examples = data.read_jsonl(config.data, config.problem_field, config.answer_field)
    else:
        examples = data.read_hub(config.data, config.data_split, config.problem_field, config.answer_field, config.data_config)
    room = models.prompt_room(policy, config.max_new_tokens)
    fitting = [e for e in examples if len(data.encode_prompt(policy, e.problem)) <= room]
    random.Random("validation").shuffle(fitting)     # the same hold-out for every seed and method
    held_out, train = fitting[:config.validation_size], fitting[config.validation_size:]
    if len(train) < config.prompts_per_step:
        raise UserError(f"{config.data}: {len(train)} problems are left for training ({len(examples) - len(fitting)} of {len(examples)} do "
                        f"not fit the context, {len(held_out)} are held out), fewer than --prompts-per-step {config.prompts_per_step}")
    return train, held_out, f"{len(train)} problems, {len(held_out)} held out, {len(examples) - len(fitting)} too long and left out"


def examples_of_step(examples: list[data.Example], step: int, count: int, seed: int) -> list[data.Example]:
    """The problems of a step (from 1): each epoch goes through all of them in a new order."""
    def position(k: int) -> data.Example:
        epoch, i = divmod(k, len(examples))
        return examples[random.Random(f"{seed}-{epoch}").sample(range(len(examples)), len(examples))[i]]
    return [position(k) for k in range((step - 1) * count, step * count)]


def validate(policy: models.Policy, config: Config, held_out: list[data.Example], cast, tell) -> dict[str, float]:
    """Greedy and sampled accuracy on the held-out problems; the same uniform numbers every time, so changes are paired."""
    prompts = [data.encode_prompt(policy, e.problem) for e in held_out]
    accuracy = {}
    for name, temperature in (("validation_greedy", 0.0), ("validation_sampled", config.temperature)):
        right = 0
        for i in range(0, len(held_out), VALIDATION_ROWS):
            uniforms = draw_uniforms(len(prompts[i:i + VALIDATION_ROWS]), config.max_new_tokens, random_stream("validation", i))
            with cast():
                batch = sample(policy, prompts[i:i + VALIDATION_ROWS], 1, config.max_new_tokens, uniforms, temperature,
                               stop_strings=data.stop_strings(policy),
                               progress=lambda live: tell(f"{name} {i}/{len(held_out)}, {live} writing"))
            right += sum(is_correct(text, e.answer) for text, e in zip(batch.texts, held_out[i:i + VALIDATION_ROWS]))
        accuracy[name] = right / len(held_out)
    return accuracy


# --------------------------------------------------------------------------------------------------------------------
# one step

def train_step(policy, ref_model, optimizer, examples, config: Config, step: int, cast, tell) -> tuple[dict, list[dict]]:
    """One step of the algorithm. Returns its metrics record and a few samples."""
    clock = [time.perf_counter()]

    tell("sampling")                                                                 # 1. G completions per problem
    prompts = [data.encode_prompt(policy, e.problem) for e in examples]
    uniforms = draw_uniforms(len(prompts) * config.group_size, config.max_new_tokens, random_stream(config.seed, step, "rollout"))
    with cast():
        batch = sample(policy, prompts, config.group_size, config.max_new_tokens, uniforms, config.temperature,
                       stop_strings=data.stop_strings(policy), progress=lambda live: tell(f"sampling, {live} writing"))

    owners = [e for e in examples for _ in range(config.group_size)]                 # 2. rewards and advantages
    rewards = torch.tensor([float(is_correct(text, e.answer)) for text, e in zip(batch.texts, owners)], device=batch.prompt_ids.device)
    advantages = grpo.group_advantages(rewards, config.group_size)                   # (B,)
    roles = record.lab_roles(policy, batch, owners) if policy.is_lab else None
    clock.append(time.perf_counter())

    tell("attributing")                                                              # 3. importance -> weights -> w_t * A_i
    with cast():
        credit = assign_credit(policy, batch, rewards, advantages, config, config.group_size, config.temperature,
                               random_stream(config.seed, step, "attribution"), config.tokens_per_pass, roles)
    clock.append(time.perf_counter())

    tell("updating")                                                                 # 4. the clipped surrogate
    coefficients = grpo.loss_coefficients(batch.completion_mask, config.loss_norm, config.max_new_tokens)
    policy.model.train(config.gradient_checkpointing)
    learned = grpo.update(policy.model, optimizer, batch, credit.token_advantages, coefficients, temperature=config.temperature,
                          inner_epochs=config.inner_epochs, token_budget=config.tokens_per_pass, clip_low=config.clip_low,
                          clip_high=config.clip_high, max_grad_norm=config.max_grad_norm, ref_model=ref_model,
                          kl_beta=config.kl_beta, autocast=cast)
    policy.model.eval()
    clock.append(time.perf_counter())

    seconds = {f"seconds_{name}": b - a for name, a, b in zip(("rollout", "attribution", "update"), clock, clock[1:])}
    line = {"step": step, **record.describe(batch, rewards, advantages, credit, roles, config.group_size), **learned, **seconds,
              **{f"share_{name[8:]}": value / (clock[-1] - clock[0]) for name, value in seconds.items()},
              "memory_mb": metrics.peak_memory_mb(batch.prompt_ids.device)}
    return line, record.describe_samples(policy, batch, owners, rewards, advantages, credit, step)


# --------------------------------------------------------------------------------------------------------------------
# the run

def main() -> None:
    config, session, run = parse_config(sys.argv[1:])
    say = (lambda *text: None) if session.quiet else partial(print, flush=True)
    device = models.pick_device(config.device)
    dtype = models.pick_dtype(config.dtype, device)
    cast = partial(models.autocast, device, dtype)
    last = checkpoint.latest_checkpoint(run) if session.resume else None
    policy = models.load(str(last or config.model), device, config.trust_remote_code)
    apply_preset(config, policy.is_lab)
    examples, held_out, note = load_examples(config, policy)
    ref_model = models.load(config.model, device, config.trust_remote_code).model.requires_grad_(False) if config.kl_beta else None
    if config.gradient_checkpointing:
        policy.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    done = checkpoint.restore_optimizer(last, optimizer) if last else 0

    run.mkdir(parents=True, exist_ok=True)
    checkpoint.write_atomically(run / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    for name in ("metrics.jsonl", "samples.jsonl"):
        checkpoint.cut_records(run / name, done)
    parameters = sum(p.numel() for p in policy.model.parameters())
    say(f"{config.method} on {config.model} ({parameters / 1e6:.1f} M parameters, {device}, {dtype} compute over float32 weights), {note}")
    say(f"{config.steps} steps of {config.prompts_per_step} x {config.group_size} completions of up to {config.max_new_tokens} tokens, "
        f"lr {config.lr:g}, seed {config.seed}; run folder {run}" + (f"; resumed after step {done}" if last else ""))

    bar = tqdm(total=config.steps, initial=done, unit="step", miniters=0, disable=session.quiet, dynamic_ncols=True)

    def tell(what: str) -> None:                     # the bar says what it is doing, drawn at its own pace
        bar.set_description(what, refresh=False)
        bar.update(0)

    if done == 0 and held_out:
        checkpoint.append_jsonl(run / "metrics.jsonl", {"step": 0, **validate(policy, config, held_out, cast, tell)})
    for step in range(done + 1, config.steps + 1):
        problems = examples_of_step(examples, step, config.prompts_per_step, config.seed)
        line, samples = train_step(policy, ref_model, optimizer, problems, config, step, cast, tell)
        last_step = step == config.steps
        if held_out and (last_step or (config.eval_every and step % config.eval_every == 0)):
            line |= validate(policy, config, held_out, cast, tell)
        checkpoint.append_jsonl(run / "metrics.jsonl", line)
        if last_step or step % SAMPLES_EVERY == 1:
            for one in samples:
                checkpoint.append_jsonl(run / "samples.jsonl", one)
        if last_step or step % config.save_every == 0:
            checkpoint.save_checkpoint(run, step, policy.model, policy.tokenizer, optimizer)
        bar.set_postfix_str(f"reward {line['reward']:.2f}, length {line['length']:.0f}, entropy {line['entropy']:.2f}")
        bar.update()
        if line["truncated_share"] == 1:
            bar.write(f"step {step}: every completion was cut at --max-new-tokens {config.max_new_tokens}; none could end by itself")
    bar.close()

    records = checkpoint.read_records(run / "metrics.jsonl")
    plots.training_curves(records, f"{config.method} on {config.model}, seed {config.seed}", run / "curves.png")
    record.summarise(records, say)
    say(f"run folder  {run}   (curves.png, metrics.jsonl, samples.jsonl, checkpoints/)\n"
        f"try next    python evaluate.py --model {run} --data {config.data}")


if __name__ == "__main__":
    exit_cleanly(main)
