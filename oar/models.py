"""Load a policy and its tokenizer: the lab's own, a hub id, a local folder (a model or a run) or a .gguf file.

1. Weights are float32, also when the compute dtype is bfloat16 (autocast): with AdamW at lr 1e-6 a bfloat16 weight of
   0.05 would not move at all, its spacing is larger than the step.
2. Dropout is switched off: the old and the new log-probabilities of the first pass are then the same numbers, in
   train mode too (which gradient checkpointing needs).
3. Remote code is never run unless `trust_remote_code` is set.
"""
import inspect
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from oar import lab, lora
from oar.checkpoint import latest_checkpoint
from oar.errors import UserError


class Policy(NamedTuple):
    """A language model with what is needed to sample from it."""
    model: torch.nn.Module
    tokenizer: transformers.PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]          # every id that ends a completion
    is_lab: bool                      # speaks the lab's language (told by its vocabulary)


def pick_device(name: str) -> torch.device:
    """"auto" takes CUDA, then MPS, then the CPU. UserError when the named device is not there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    if not available[name]:
        raise UserError(f"--device {name}: this machine has no {name} device that torch can use")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Compute dtype: "auto" is bfloat16 on a CUDA device that supports it, float32 elsewhere."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    return getattr(torch, name)


def autocast(device: torch.device, dtype: torch.dtype):
    """Context in which the model computes: bfloat16 autocast over float32 master weights, or nothing for float32."""
    return torch.autocast(device.type, dtype=dtype) if dtype == torch.bfloat16 else nullcontext()


def load(name: str, device: torch.device, trust_remote_code: bool = False, quiet: bool = False) -> Policy:
    """Load a policy in float32, in eval mode; `name` is "lab", a hub id, a local folder or a .gguf file.

    The folder of a LoRA adapter gives the model it belongs to with the adapter merged in.
    UserError, in one sentence, when the file or folder is missing or incomplete, or the hub cannot be reached.
    """
    source, options = locate(name)
    if base := lora.base_of(source):
        policy = load(base, device, trust_remote_code, quiet)
        return policy._replace(model=lora.merge(policy.model, source).eval())
    transformers.utils.logging.disable_progress_bar()
    if quiet and options:
        silence_gguf_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        where = "cannot be loaded" if Path(source).is_dir() else "not on this disk, and the hub gave"
        raise UserError(f"--model {name}: {where}: {why}") from error
    if getattr(model, "hf_quantizer", None) and "gguf_file" in options:      # now plain float32 weights, which trainers may train and save as such
        model.hf_quantizer.remove_quantization_config(model)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UserError(f"--model {name}: {type(model).__name__} cannot compute logits at chosen positions (logits_to_keep)")
    prepare_tokenizer(tokenizer, model)
    disable_dropout(model)
    return Policy(model.to(device).eval(), tokenizer, eos_token_ids(model, tokenizer), lab.is_lab(tokenizer))


def locate(name: str) -> tuple[str, dict]:
    """What `from_pretrained` takes for a model name: (folder or hub id, extra options). UserError for a path that is not there."""
    path = Path(name).expanduser()
    if name == "lab":
        return str(lab.POLICY_DIR), {}
    if name.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"--model {name}: no such file")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        last = latest_checkpoint(path)
        return str(last or path), {}
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or path.exists():
        raise UserError(f"--model {name}: no such folder, and not a hub id (owner/name)")
    return name, {}


def silence_gguf_bar() -> None:
    """Reading a .gguf file draws a bar of its own, which the switch above does not reach."""
    from transformers import modeling_gguf_pytorch_utils as reader
    reader.tqdm = partial(tqdm, disable=True)


def prepare_tokenizer(tokenizer, model) -> None:
    """Give a tokenizer without a pad token one that exists: the eos token (masks come from lengths, so pad = eos is fine)."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is not None:
            tokenizer.pad_token = tokenizer.eos_token
        else:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    if len(tokenizer) > model.config.get_text_config().vocab_size:
        raise UserError(f"the tokenizer has {len(tokenizer)} tokens but the model only {model.config.get_text_config().vocab_size}")


def eos_token_ids(model, tokenizer) -> tuple[int, ...]:
    """Every id that ends a completion: the tokenizer's eos and those of the generation config (chat models have several)."""
    named = model.generation_config.eos_token_id if model.generation_config else None
    named = named if isinstance(named, (list, tuple)) else [named]
    return tuple(sorted({i for i in [*named, tokenizer.eos_token_id] if i is not None}))


def prompt_room(policy: Policy, max_new_tokens: int) -> int:
    """Longest prompt, in tokens, that leaves room for `max_new_tokens` in the model's context."""
    return getattr(policy.model.config.get_text_config(), "max_position_embeddings", sys.maxsize) - max_new_tokens


def disable_dropout(model) -> None:
    """Set every dropout probability to 0, modules and attention attributes alike."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
