"""What the cost benchmarks share: one training step in its three phases, peak memory, a line about the machine."""
import copy
import ctypes
import math
import platform
import time
from pathlib import Path

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from oar import grpo
from oar.batch import random_stream
from oar.credit import CreditConfig, assign_credit
from oar.optimizer import make_optimizer
from oar.rollout import draw_uniforms, sample
from oar.verify import is_correct

PHASES = ("rollout", "attribution", "update")


def machine() -> str:
    """Processor, threads and versions, for the line under a table."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return (f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
            f"transformers {transformers.__version__}")


def training_step(policy, prompts: list[list[int]], method: str, *, group_size: int, max_new_tokens: int, lr: float, tokens_per_pass: int,
                  seed: int, golds: list[str] | None = None, stop_strings: list[str] = ()) -> dict[str, float]:
    """Seconds of each phase of one step of `method` on a copy of the policy, their total, and the number of tokens sampled.

    Without `golds` every other completion is called right, so that all of them have to be scored.
    """
    policy = policy._replace(model=copy.deepcopy(policy.model))
    optimizer = make_optimizer("adamw", policy.model, lr, weight_decay=0.0)
    uniforms = draw_uniforms(len(prompts) * group_size, max_new_tokens, random_stream(seed, "rollout"))
    clock = [time.perf_counter()]
    batch = sample(policy, prompts, group_size, max_new_tokens, uniforms, stop_strings=stop_strings)
    if golds:
        owners = [gold for gold in golds for _ in range(group_size)]
        rewards = torch.tensor([float(is_correct(text, gold)) for text, gold in zip(batch.texts, owners)])
    else:
        rewards = torch.arange(len(batch)).remainder(2).float()
    advantages = grpo.group_advantages(rewards, group_size)
    clock.append(time.perf_counter())
    credit = assign_credit(policy, batch, rewards, advantages, CreditConfig(method=method), group_size, 1.0,
                           random_stream(seed, "attribution"), tokens_per_pass)
    clock.append(time.perf_counter())
    coefficients = grpo.loss_coefficients(batch.completion_mask, "sequence", max_new_tokens)
    grpo.update(policy.model, optimizer, batch, credit.token_advantages, coefficients, temperature=1.0, inner_epochs=1,
                token_budget=tokens_per_pass, clip_low=0.2, clip_high=0.2, max_grad_norm=1.0)
    clock.append(time.perf_counter())
    return {phase: b - a for phase, a, b in zip(PHASES, clock, clock[1:])} | {"total": clock[-1] - clock[0], "tokens": int(batch.completion_mask.sum())}


def fitted_exponent(sizes: list[float], seconds: list[float]) -> float:
    """The slope of log seconds against log size (least squares)."""
    x, y = [math.log(s) for s in sizes], [math.log(s) for s in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)


def seconds_of(run) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def matrix_limit(rows: int, inner: int, outer: int) -> float:
    """Float32 operations per second of a (rows, inner) x (inner, outer) product, best of 10: what a forward cannot beat."""
    x, weight = torch.randn(rows, inner), torch.randn(outer, inner)
    return 2 * rows * inner * outer / min(seconds_of(lambda: torch.nn.functional.linear(x, weight)) for _ in range(10))


class Operations(TorchDispatchMode):
    """Counts the operations of matrix products and attention in a block of code, backward passes included."""
    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        self.total += count(*args, **(kwargs or {}), out_val=out) if count else 0
        return out


class PeakMemory:
    """Resident memory in MiB that a block of code needed on top of what was there before (Linux; NaN elsewhere).

        with PeakMemory() as peak: ...
        peak.mib
    """
    mib = math.nan

    def __enter__(self):
        try:
            ctypes.CDLL("libc.so.6").malloc_trim(0)              # give back what earlier blocks freed
            Path("/proc/self/clear_refs").write_text("5")        # the peak starts again from here
            self.before = _status("VmRSS")
        except OSError:
            self.before = math.nan
        return self

    def __exit__(self, *error):
        self.mib = (_status("VmHWM") - self.before) / 2 ** 10


def _status(field: str) -> float:
    return next((float(line.split()[1]) for line in _lines("/proc/self/status") if line.startswith(field)), math.nan)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
