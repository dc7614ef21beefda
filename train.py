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
import math
import random
import sys
import time
from functools import lru_cache, partial
from pathlib import Path

import torch
from tqdm import tqdm

from oar import checkpoint, data, grpo, halving, interrupt, lock, lora, memory, metrics, models, plots, record
from oar.batch import random_stream
from oar.config import Config, Session, apply_preset, parse_config
from oar.credit import assign_credit
from oar.errors import UserError, exit_cleanly
from oar.optimizer import make_optimizer
from oar.rollout import draw_uniforms, sample_in_parts
from oar.verify import is_correct

SAMPLES_EVERY = 10       # steps between entries of samples.jsonl
VALIDATION_ROWS = 128    # validation completions decoded together


# --------------------------------------------------------------------------------------------------------------------
# data and validation

def load_examples(config: Config, policy: models.Policy) -> tuple[list[data.Example], list[data.Example], str]:
    """(training problems, held-out validation problems, a note); problems that do not fit the context are left out."""
    room = models.prompt_room(policy, config.max_new_tokens)
    if config.data == "lab":
        examples = data.lab_examples("train", config.steps * config.prompts_per_step, config.instructions, config.seed)
        held_out = data.lab_examples("validation", config.validation_size, config.instructions, 0)
        if len(data.encode_prompt(policy, examples[0].problem)) > room:      # they are all of one length
            raise UserError(f"--instructions {config.instructions} and --max-new-tokens {config.max_new_tokens} do not fit the context together")
        return examples, held_out, f"{len(examples)} lab problems"
    if Path(config.data).suffix in (".jsonl", ".json") or Path(config.data).exists():
        examples = data.read_jsonl(config.data, config.problem_field, config.answer_field)
    else:
        examples = data.read_hub(config.data, config.data_split, config.problem_field, config.answer_field, config.data_config)
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
        return examples[epoch_order(len(examples), seed, epoch)[i]]
    return [position(k) for k in range((step - 1) * count, step * count)]


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"{seed}-{epoch}").sample(range(count), count)


def validate(policy: models.Policy, config: Config, held_out: list[data.Example], cast, tell) -> dict[str, float]:
    """Greedy and sampled accuracy on the held-out problems; the same uniform numbers every time, so changes are paired."""
    prompts = [data.encode_prompt(policy, e.problem) for e in held_out]
    accuracy = {}
    for name, temperature in (("validation_greedy", 0.0), ("validation_sampled", config.temperature)):
        right = 0
        for i in range(0, len(held_out), VALIDATION_ROWS):
            uniforms = draw_uniforms(len(prompts[i:i + VALIDATION_ROWS]), config.max_new_tokens, random_stream("validation", i))
            with cast():
                batch = sample_in_parts(policy, prompts[i:i + VALIDATION_ROWS], 1, config.max_new_tokens, uniforms, temperature,
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
    with cast(), halving.phase("rollout") as rollout:
        batch = sample_in_parts(policy, prompts, config.group_size, config.max_new_tokens, uniforms, config.temperature,
                                stop_strings=data.stop_strings(policy), progress=lambda live: tell(f"sampling, {live} writing"))

    owners = [e for e in examples for _ in range(config.group_size)]                 # 2. rewards and advantages
    verdicts = [is_correct(text, e.answer) for text, e in zip(batch.texts, owners)]  # None or NaN: no reward can be had
    rewards = torch.tensor([math.nan if v is None else float(v) for v in verdicts], device=batch.prompt_ids.device)
    advantages = grpo.group_advantages(rewards, config.group_size)                   # (B,)
    roles = record.lab_roles(policy, batch, owners) if policy.is_lab else None
    clock.append(time.perf_counter())

    tell("attributing")                                                              # 3. importance -> weights -> w_t * A_i
    with cast(), halving.phase("attribution") as attribution:
        credit = assign_credit(policy, batch, rewards, advantages, config, config.group_size, config.temperature,
                               random_stream(config.seed, step, "attribution"), config.tokens_per_pass, roles)
    clock.append(time.perf_counter())

    tell("updating")                                                                 # 4. the clipped surrogate
    coefficients = grpo.loss_coefficients(batch.completion_mask, config.loss_norm, config.max_new_tokens, rewards.isfinite())
    policy.model.train(config.gradient_checkpointing)
    with halving.phase("update") as update:
        if not batch.entropy.isfinite().all():
            learned = {"skipped": "sampling distribution"}
        elif not credit.finite:
            learned = {"skipped": "importance"}
        else:
            learned = grpo.update(policy.model, optimizer, batch, credit.token_advantages, coefficients, temperature=config.temperature,
                                  inner_epochs=config.inner_epochs, token_budget=config.tokens_per_pass, clip_low=config.clip_low,
                                  clip_high=config.clip_high, max_grad_norm=config.max_grad_norm, ref_model=ref_model,
                                  kl_beta=config.kl_beta, autocast=cast)
    policy.model.eval()
    clock.append(time.perf_counter())

    seconds = {f"seconds_{name}": b - a for name, a, b in zip(("rollout", "attribution", "update"), clock, clock[1:])}
    line = {"step": step, **record.describe(batch, rewards, advantages, credit, roles, config.group_size), **learned, **seconds,
              **{f"share_{name[8:]}": value / (clock[-1] - clock[0]) for name, value in seconds.items()},
              "memory_halvings": rollout.halvings + attribution.halvings + update.halvings,
              "memory_mb": metrics.peak_memory_mb(batch.prompt_ids.device)}
    return record.finite(line), record.describe_samples(policy, batch, owners, rewards, advantages, credit, step)


# --------------------------------------------------------------------------------------------------------------------
# the run

def main() -> None:
    config, session, run = parse_config(sys.argv[1:], __doc__.split("\n")[0])
    with lock.hold(run), interrupt.deferred() as stopping:
        train(config, session, run, stopping)


def load_policy(config: Config, session: Session, last: Path | None, device: torch.device) -> models.Policy:
    """The policy as it starts, or as the checkpoint `last` holds it; also fills in the preset, which depends on it."""
    source = str(last if last and not config.lora_rank else config.model)
    policy = models.load(source, device, config.trust_remote_code, session.quiet)
    if config.lora_rank:
        lora.attach(policy.model, config.lora_rank, config.model, config.seed, last)
    apply_preset(config, policy.is_lab)
    return policy


def prepare_update(config: Config, session: Session, policy: models.Policy, last: Path | None) -> tuple:
    """(ref_model or None, optimizer, steps done): what an update needs besides the policy."""
    ref_model = None
    if config.kl_beta:
        ref_model = models.load(config.model, policy.model.device, config.trust_remote_code, session.quiet).model.requires_grad_(False)
    if config.gradient_checkpointing:
        policy.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    optimizer = make_optimizer(config.optimizer, policy.model, config.lr, config.weight_decay)
    return ref_model, optimizer, checkpoint.restore_optimizer(last, optimizer) if last else 0


def announce(config: Config, run: Path, policy: models.Policy, examples: list[data.Example], note: str, dtype: torch.dtype, cast) -> None:
    """Say what will be trained on what, and the memory it will take."""
    device, parameters = policy.model.device, sum(p.numel() for p in policy.model.parameters())
    print(f"{config.method} on {config.model} ({parameters / 1e6:.1f} M parameters, {device}, {dtype} compute over float32 weights), {note}\n"
          f"{config.steps} steps of {config.prompts_per_step} x {config.group_size} completions of up to {config.max_new_tokens} tokens, "
          f"lr {config.lr:g}, seed {config.seed}; run folder {run}")
    prompt_tokens = max(len(data.encode_prompt(policy, e.problem)) for e in examples[:64])
    planned = memory.plan(policy.model, config, prompt_tokens, cast, dtype.itemsize)
    print(memory.describe(planned, memory.available_bytes(device)), flush=True)


def train(config: Config, session: Session, run: Path, stopping) -> None:
    """A run, or the rest of it, in a folder that is ours alone; `stopping()` is the number of a signal that asks to stop, or 0."""
    device = models.pick_device(config.device)
    dtype = models.pick_dtype(config.dtype, device)
    cast = partial(models.autocast, device, dtype)
    last = checkpoint.latest_checkpoint(run) if session.resume else None
    policy = load_policy(config, session, last, device)
    examples, held_out, note = load_examples(config, policy)
    ref_model, optimizer, done = prepare_update(config, session, policy, last)

    checkpoint.write_atomically(run / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    for name in ("metrics.jsonl", "samples.jsonl"):
        checkpoint.cut_records(run / name, done if last else -1)
    if not session.quiet:
        announce(config, run, policy, examples, f"{note}; resumed after step {done}" if last else note, dtype, cast)
    bar = tqdm(total=config.steps, initial=done, unit="step", miniters=0, disable=session.quiet, dynamic_ncols=True)

    def tell(what: str) -> None:                     # the bar says what it is doing, drawn at its own pace
        bar.set_description(what, refresh=False)
        bar.update(0)

    if not last and held_out:
        checkpoint.append_jsonl(run / "metrics.jsonl", {"step": 0, **validate(policy, config, held_out, cast, tell)})
    if stopping():
        interrupt.leave(stopping(), done, config.steps, run)
    for step in range(done + 1, config.steps + 1):
        problems = examples_of_step(examples, step, config.prompts_per_step, config.seed)
        line, samples = train_step(policy, ref_model, optimizer, problems, config, step, cast, tell)
        last_step = step == config.steps
        if held_out and (last_step or (config.eval_every and step % config.eval_every == 0)):
            line |= validate(policy, config, held_out, cast, tell)
        checkpoint.append_jsonl(run / "metrics.jsonl", line)
        if last_step or step % SAMPLES_EVERY == 1:
            checkpoint.append_jsonl(run / "samples.jsonl", *samples)
        stop, skips = stopping(), record.skipped_in_a_row(run / "metrics.jsonl") if line["skipped"] else 0
        give_up = skips >= config.max_skipped
        if last_step or stop or give_up or step % config.save_every == 0:
            checkpoint.save_checkpoint(run, step, policy.model, policy.tokenizer, optimizer)
        bar.set_postfix_str(record.postfix(line))
        bar.update()
        for text in record.remarks(line, config.max_new_tokens):
            bar.write(text)
        if give_up:
            raise UserError(f"the {line['skipped']} was not finite in {skips} steps in a row (--max-skipped); the state before them is saved in {run}")
        if stop and not last_step:
            bar.close()
            interrupt.leave(stop, step, config.steps, run)
    bar.close()
    report(config, session, run)


def report(config: Config, session: Session, run: Path) -> None:
    """The finished run's picture and its last words."""
    records = checkpoint.read_records(run / "metrics.jsonl")
    with checkpoint.writing(run / "curves.png"):
        plots.training_curves(records, f"{config.method} on {config.model}, seed {config.seed}", run / "curves.png")
    if not session.quiet:
        record.summarise(records)
        print(f"run folder  {run}   (curves.png, metrics.jsonl, samples.jsonl, checkpoints/)\n"
              f"try next    python evaluate.py --model {run} --data {config.data}")


if __name__ == "__main__":
    with interrupt.at_once("stopped at once; --resume goes on from the last checkpoint"):
        exit_cleanly(main)
