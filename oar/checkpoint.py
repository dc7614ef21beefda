"""Checkpoints that `from_pretrained` opens, written whole or not at all, and records that survive a kill.

A run folder holds config.json, metrics.jsonl, samples.jsonl, curves.png and checkpoints/step_000060/, which is an
ordinary model folder (safetensors, tokenizer; with LoRA the adapter alone) plus trainer.pt (optimiser state and step)
and manifest.json.

1. A checkpoint is written to a temporary folder, flushed to the disk and renamed.  The one before it stays until then.
2. manifest.json holds size and SHA-256 of every other file.  A checkpoint that does not match it is passed over, with a
   message, for the one before.
3. Randomness needs no saving: every random number comes from a stream keyed by seed and step (batch.random_stream), the
   data position follows from the step, and no global generator is read.
4. A write that fails (full disk, quota, permissions) is one sentence, and nothing that was saved before it is touched.
"""
import hashlib
import json
import os
import re
import shutil
import sys
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError

from oar import lora
from oar.errors import UserError

KEEP = 2     # the last checkpoint and the one before it
MANIFEST = "manifest.json"
# Written as \u escapes: they could act on a terminal, or end a line for readers that split on more than "\n".
UNSAFE = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


# --------------------------------------------------------------------------------------------------------------------
# files

@contextmanager
def writing(path: Path):
    """Whatever fails while `path` is written becomes a UserError that names it."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:        # torch and safetensors hide the OSError that they met
        root = error.__context__ if isinstance(error.__context__, OSError) else error
        why = getattr(root, "strerror", None) or next(iter(str(root).strip().splitlines()), type(root).__name__)
        raise UserError(f"{path} cannot be written ({why}); what was saved before is whole and can be continued") from error


def sync(path: Path) -> None:
    """Wait until a file or folder has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file through a temporary neighbour, so that a reader sees the old file or the new one, never half."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)


def json_line(record: dict) -> str:
    """A record as one line of JSON that is safe to print."""
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(record, ensure_ascii=False)) + "\n"


def append_jsonl(path: Path, *records: dict) -> None:
    """Append records, one line each."""
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write("".join(map(json_line, records)))


def read_records(path: Path) -> list[dict]:
    """Records of a JSONL file; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line]


def cut_records(path: Path, last_step: int) -> None:
    """Drop records after `last_step`: the steps that a resumed run will do again. UserError for a damaged line."""
    try:
        kept = [record for record in read_records(path) if record["step"] <= last_step]
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path}: holds a line that is not a record of this program") from None
    write_atomically(path, "".join(map(json_line, kept)))


# --------------------------------------------------------------------------------------------------------------------
# checkpoints

def save_checkpoint(run: Path, step: int, model, tokenizer, optimizer) -> Path:
    """Save model (float32), tokenizer and optimiser as run/checkpoints/step_NNNNNN, and keep the last two.

    Records go to the disk first: a checkpoint never outlives the metrics of its own steps.  UserError when the disk is full.
    """
    folder = run / "checkpoints"
    final, temporary = folder / f"step_{step:06d}", folder / f"writing_{os.getpid()}"
    with writing(final):
        for left_behind in folder.glob("writing_*"):                 # by a kill
            shutil.rmtree(left_behind)
        for records in run.glob("*.jsonl"):
            sync(records)
        try:
            if hasattr(model, "peft_config"):
                lora.save(model, temporary)
            else:
                model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            with open(temporary / "trainer.pt", "wb") as file:       # a file of Python's own, whose errors have a reason
                torch.save({"step": step, "optimizer": optimizer.state_dict()}, file)
            seal(temporary)
            shutil.rmtree(final, ignore_errors=True)                 # a damaged one of this step
            os.replace(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)             # gives a full disk its room back
            raise
        sync(folder)
    kept = [checkpoint for checkpoint in _checkpoints(run) if checkpoint <= final][-KEEP:]
    for old in set(_checkpoints(run)) - {*kept}:                     # later ones were found damaged: this run came from before them
        shutil.rmtree(old)
    return final


def seal(folder: Path) -> None:
    """Flush every file of a new checkpoint to the disk and write its manifest."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path, *_identity(path))} for path in files}
    for path in files:
        sync(path)
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    sync(folder)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words; None when every file is as its manifest says."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        for name, wanted in manifest.items():
            size = (checkpoint / name).stat().st_size
            if size != wanted["size"]:
                return f"{name} has {size} bytes instead of {wanted['size']}"
            if _sha256(checkpoint / name, *_identity(checkpoint / name)) != wanted["sha256"]:
                return f"{name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    return None


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)
def _sha256(path: Path, *identity: int) -> str:
    """Hash of a file, computed once for as long as its `identity` stays."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2 ** 20):
            digest.update(part)
    return digest.hexdigest()


def _checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step_*"))


def latest_checkpoint(run: Path) -> Path | None:
    """The newest whole checkpoint of a run folder, None when it has none at all; damaged ones are passed over with a message.

    UserError when there are some and every one is damaged.
    """
    found = _checkpoints(run)
    for checkpoint in reversed(found):
        fault = damage(checkpoint)
        if fault is None:
            return checkpoint
        _warn(f"{checkpoint} is damaged ({fault}) and passed over")
    if found:
        raise UserError(f"{run}: every checkpoint is damaged; remove {run / 'checkpoints'} to begin the run again")
    return None


@lru_cache(maxsize=None)
def _warn(message: str) -> None:
    """Say something once on standard error."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def restore_optimizer(checkpoint: Path, optimizer) -> int:
    """Load the optimiser state of a checkpoint and return its step. (The weights are loaded by `models.load`.)"""
    state = torch.load(checkpoint / "trainer.pt", map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]
