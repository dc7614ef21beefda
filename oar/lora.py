"""LoRA for train.py (optional: pip install peft): the weights stay, a product of two thin matrices is added to each.

    y = x W + 2 x A B        A (in, r), B (r, out), B = 0 at the start, for every linear layer but the output head

Only A and B are trained, so gradients and optimiser state shrink to about a hundredth.  The adapters are injected into
the model itself: its class, its forward and the attribution code stay what they are.

A checkpoint holds the adapter and the name of the model it belongs to.  A run is resumed from the adapter, which gives
the same numbers to the bit; everybody else (`models.load`) gets the adapter merged into the weights, an ordinary model.
"""
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from oar.errors import UserError

ADAPTER_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."          # how peft names the weights of a saved adapter


def import_peft(flag: str):
    """The package peft. UserError naming the flag or folder that needs it."""
    try:
        import peft
    except ImportError:
        raise UserError(f"{flag}: needs the package peft (pip install peft)") from None
    return peft


def attach(model, rank: int, base: str, seed: int, checkpoint: Path | None = None) -> None:
    """Freeze `model` and add adapters of `rank`, drawn by `seed` or taken from a checkpoint; `base` is the model's name."""
    peft = import_peft(f"--lora-rank {rank}")
    with torch.random.fork_rng():                    # peft draws A from the global generator
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"), model)
    model.peft_config["default"].base_model_name_or_path = str(Path(base).resolve()) if Path(base).exists() else base
    if checkpoint:
        saved = peft.load_peft_weights(str(checkpoint), device=str(model.device))
        peft.set_peft_model_state_dict(model, {name.removeprefix(PREFIX): value for name, value in saved.items()})


def save(model, folder: Path) -> None:
    """Write the adapter of `model` as a folder that peft opens."""
    import peft
    folder.mkdir(parents=True, exist_ok=True)
    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file({PREFIX + name: value.contiguous() for name, value in state.items()}, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(str(folder))


def base_of(folder: str) -> str | None:
    """Name of the model that an adapter folder belongs to; None for a folder (or hub id) that is no adapter."""
    path = Path(folder) / ADAPTER_CONFIG
    return json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"] if path.is_file() else None


def merge(model, folder: str):
    """`model` with the adapter of `folder` added into its weights."""
    peft = import_peft(f"--model {folder}")
    return peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
