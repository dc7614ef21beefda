"""Settings of a training run: one dataclass field per flag, presets per kind of model, and the checks of both.

The same object is printed, saved as config.json in the run folder and compared when the run is resumed.
"""
import dataclasses
import json
import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Optional

from transformers import HfArgumentParser

from oar import lab
from oar.credit import CreditConfig, check_credit
from oar.errors import UserError
from oar.flags import flag, parse_flags
from oar.optimizer import OPTIMIZERS

# Defaults that depend on the model; each is overridden by its flag and printed at the start.
PRESETS = {
    "lab": dict(data="lab", steps=60, prompts_per_step=8, group_size=8, max_new_tokens=80, lr=1e-4, validation_size=256,
                eval_every=20, tokens_per_pass=8192),
    "real": dict(data="openai/gsm8k", steps=200, prompts_per_step=16, group_size=8, max_new_tokens=1024, lr=1e-6,
                 validation_size=100, eval_every=0, tokens_per_pass=8192),
}

# Beyond these a value is a slip of the keyboard; some would fill the memory before anything else could tell.
AT_MOST = {"lr": 1, "temperature": 100, "steps": 1_000_000, "prompts_per_step": 10_000, "group_size": 10_000, "inner_epochs": 1_000,
           "max_new_tokens": 1_000_000, "validation_size": 100_000, "noise_draws": 10_000, "fisher_samples": 10_000, "instructions": 10_000}


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

    optimizer: Literal[OPTIMIZERS] = flag("adamw", "adamw8bit (needs bitsandbytes) and adafactor keep less state (oar/optimizer.py).")
    lr: Optional[float] = flag(None, "Learning rate; LoRA takes about ten times that of full training.")
    weight_decay: float = flag(0.0, "Weight decay.")
    lora_rank: int = flag(0, "Train LoRA adapters of this rank instead of all weights (needs peft); 0 for all weights.")
    inner_epochs: int = flag(1, "Optimiser steps per rollout, against fixed old log-probabilities.")
    clip_low: float = flag(0.2, "Lower clip range of the ratio.")
    clip_high: float = flag(0.2, "Upper clip range of the ratio.")
    loss_norm: Literal["sequence", "token", "constant"] = flag("sequence", "How token losses are averaged (oar/grpo.py).")
    kl_beta: float = flag(0.0, "Weight of the KL to the frozen initial policy; 0 keeps no reference.")
    max_grad_norm: float = flag(1.0, "Gradient clipping.")
    max_skipped: int = flag(5, "Steps in a row without a finite loss, gradient or importance at which the run stops.")

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


def parse_config(argv: list[str], description: str) -> tuple[Config, Session, Path]:
    """Flags -> (resolved config, session, run folder). UserError for impossible or contradictory values."""
    parser = HfArgumentParser((Config, Session), description=description, allow_abbrev=False)
    config, session = parse_flags(parser, argv)
    if session.resume:
        run = Path(session.resume)
        try:
            saved = dict(json.loads((run / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
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
    if config.validation_size == 0:
        if config.eval_every:
            raise UserError(f"--eval-every {config.eval_every} with --validation-size 0: there is nothing to validate on")
        config.eval_every = 0
    for name, value in PRESETS["lab" if is_lab else "real"].items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    if config.problem_field is None:
        config.problem_field = "problem" if config.data == "lab" or Path(config.data).suffix in (".jsonl", ".json") else "question"
    if is_lab != (config.data == "lab"):
        raise UserError(f"--model {config.model} with --data {config.data}: the lab's policy and the lab's problems go together only")
    if config.method == "roles" and not is_lab:
        raise UserError("--method roles: token roles are known in the lab only")
    check_credit(config)
    positive = ["steps", "prompts_per_step", "max_new_tokens", "temperature", "lr", "inner_epochs", "max_grad_norm", "tokens_per_pass",
                "save_every", "instructions", "max_skipped"]
    not_negative = ["lora_rank", "kl_beta", "weight_decay", "clip_low", "clip_high", "validation_size", "eval_every"]
    checks = [(name, getattr(config, name) > 0, "positive") for name in positive]
    checks += [(name, getattr(config, name) >= 0, "at least 0") for name in not_negative]
    checks += [("group_size", config.group_size >= 2, "at least 2 (advantages compare completions of one problem)")]
    checks += [(name, math.isfinite(value), "finite") for name, value in vars(config).items() if isinstance(value, float)]
    checks += [(name, getattr(config, name) <= most, f"at most {most:,}") for name, most in AT_MOST.items()]
    for name, fine, want in checks:
        if not fine:
            raise UserError(f"--{name.replace('_', '-')} must be {want}, got {getattr(config, name)}")
