"""Checkpoints that `from_pretrained` opens, written whole or not at all, and records that survive a kill.

A run folder holds config.json, metrics.jsonl, samples.jsonl, curves.png and checkpoints/step_000060/, which is an
ordinary model folder (safetensors, tokenizer; with LoRA the adapter alone) plus trainer.pt (optimiser state and step).
Randomness needs no saving: every random number comes from a stream keyed by seed and step (batch.random_stream).
"""
import json
import os
import shutil
from pathlib import Path

import torch

from oar import lora

KEEP = 2     # the last checkpoint and the one before it


def write_atomically(path: Path, text: str) -> None:
    """Write a text file through a temporary neighbour, so that a reader sees the old file or the new one, never half."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def append_jsonl(path: Path, record: dict) -> None:
    """Append one record as one line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_records(path: Path) -> list[dict]:
    """Records of a JSONL file; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line]


def cut_records(path: Path, last_step: int) -> None:
    """Drop records after `last_step`: the steps that a resumed run will do again."""
    kept = [record for record in read_records(path) if record["step"] <= last_step]
    write_atomically(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))


def save_checkpoint(run: Path, step: int, model, tokenizer, optimizer) -> Path:
    """Save model (float32), tokenizer and optimiser as run/checkpoints/step_NNNNNN, and keep the last two.

    Everything is written to a temporary folder that is renamed when it is whole.
    """
    folder = run / "checkpoints"
    final, temporary = folder / f"step_{step:06d}", folder / f"writing_{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    if hasattr(model, "peft_config"):
        lora.save(model, temporary)
    else:
        model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    torch.save({"step": step, "optimizer": optimizer.state_dict()}, temporary / "trainer.pt")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for old in _checkpoints(run)[:-KEEP]:
        shutil.rmtree(old)
    return final


def _checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step_*"))


def latest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run folder, None when it has none."""
    found = _checkpoints(run)
    return found[-1] if found else None


def restore_optimizer(checkpoint: Path, optimizer) -> int:
    """Load the optimiser state of a checkpoint and return its step. (The weights are loaded by `models.load`.)"""
    state = torch.load(checkpoint / "trainer.pt", map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]
