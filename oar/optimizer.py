"""The optimisers of train.py by name, and what each keeps per trained weight.

    adamw        two float32 moments                                         8 bytes
    adamw8bit    the same in blocks of 8-bit numbers (pip install bitsandbytes)   2 bytes
    adafactor    one sum per row and per column of a matrix, no momentum     next to nothing
"""
import torch
from transformers.optimization import Adafactor

from oar.errors import UserError

OPTIMIZERS = ("adamw", "adamw8bit", "adafactor")


def make_optimizer(name: str, model, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Optimiser of the weights that are trained. UserError when a package is missing."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw":                              # fused on CUDA: no second copy of a moment during the step
        return torch.optim.AdamW(trained, lr=lr, weight_decay=weight_decay, fused=trained[0].is_cuda or None)
    if name == "adafactor":                          # lr as AdamW's: not relative to the size of the weights, no schedule
        return Adafactor(trained, lr=lr, weight_decay=weight_decay, scale_parameter=False, relative_step=False)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise UserError(f"--optimizer {name}: needs the package bitsandbytes (pip install bitsandbytes)") from None
    return AdamW8bit(trained, lr=lr, weight_decay=weight_decay)


def state_bytes(name: str, model) -> int:
    """What the optimiser will keep, in bytes."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "adafactor":
        return sum(4 * (p.numel() // p.shape[-1] + p.numel() // p.shape[-2] if p.dim() > 1 else p.numel()) for p in trained)
    return {"adamw": 8, "adamw8bit": 2}[name] * sum(p.numel() for p in trained)
