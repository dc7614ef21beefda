"""When memory runs out: the phase's budget is halved, the work goes on, and the log says so.

    with halving.phase("attribution") as attribution:
        ...                                          # batch.for_chunks and grpo.update stay within attribution.budget
    attribution.halvings                             # how often it ran out

The budget is that of one phase of one step, since the next step's completions may be shorter.
"""
import math
import sys
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tqdm import tqdm


@dataclass
class Phase:
    """A part of a training step, with the budget that it has been halved to."""
    name: str
    budget: float = math.inf
    halvings: int = 0


_running = [Phase("")]     # innermost last


@contextmanager
def phase(name: str):
    """Within, budgets are halved on behalf of this phase."""
    _running.append(Phase(name))
    try:
        yield _running[-1]
    finally:
        _running.pop()


def allowed(budget: int) -> int:
    """`budget`, or what the running phase has been halved to."""
    return min(budget, _running[-1].budget)


def halve(rows: int, budget: int) -> int:
    """Note that `rows` rows did not fit and that the phase goes on with `budget`, which is returned."""
    running = _running[-1]
    running.halvings += 1
    if running.name:                                 # outside of a phase nobody would ever lift the limit again
        running.budget = budget
    tqdm.write(f"{running.name + ': ' if running.name else ''}out of memory with {rows} rows at once; going on with {max(1, rows // 2)}",
               file=sys.stderr)
    return budget


def ran_out(error: Exception) -> bool:
    """Whether an error says that memory ran out (CUDA, MPS, the CPU and Python word it differently)."""
    text = str(error).lower()
    words = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in text for word in words)
