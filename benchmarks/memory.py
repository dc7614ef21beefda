"""The memory plan (oar/memory.py) against the memory that training steps really take, and the plan for a larger model.

    python -m benchmarks.memory --model PATH.gguf            # plan and measurement, one fresh process per setting
    python -m benchmarks.memory --table                      # Qwen2.5-Math-1.5B on 24, 48 and 80 GB, by the plan alone

A measurement runs two steps of train.py (rewards alternate, so that every completion has an advantage; no completion may
end early).  On CUDA it is the peak of allocated memory.  On a CPU it is the weights' own size plus what the resident set grows
by during the steps (Linux only: the kernel's high-water mark is set back, and the C library is told to return freed blocks
at once, so that neither its hoard nor the remains of loading a .gguf file count).
Writes benchmarks/results/memory.json.
"""
import argparse
import gc
import itertools
import json
import os
import shlex
import subprocess
import sys
from functools import lru_cache, partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Qwen2Config

import train
from benchmarks.measure import PeakMemory
from oar import data, lora, memory, models
from oar.checkpoint import write_atomically
from oar.config import Config, apply_preset
from oar.optimizer import make_optimizer

RESULT = Path(__file__).parent / "results" / "memory.json"
SIZES = "--prompts-per-step 1 --group-size 8 --max-new-tokens 64 --tokens-per-pass 512"
SETTINGS = ["--method grpo", "--method oar_g", "--method oar_p", "--method grpo --gradient-checkpointing",
            "--method oar_g --gradient-checkpointing --tokens-per-pass 256", "--method grpo --optimizer adafactor",
            "--method grpo --lora-rank 8", "--method grpo --dtype bfloat16"]
QWEN = dict(vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
            num_key_value_heads=2, tie_word_embeddings=True)
RECIPES = ["", "--gradient-checkpointing", "--gradient-checkpointing --tokens-per-pass 2560",
           "--gradient-checkpointing --tokens-per-pass 2560 --optimizer adamw8bit",
           "--gradient-checkpointing --tokens-per-pass 2560 --optimizer adafactor",
           "--gradient-checkpointing --tokens-per-pass 2560 --lora-rank 16",
           "--gradient-checkpointing --tokens-per-pass 1280 --lora-rank 16"]
CARDS, PROMPT = (24, 48, 80), 256


def config_of(flags: str) -> Config:
    config, = HfArgumentParser(Config).parse_args_into_dataclasses(shlex.split(flags))
    apply_preset(config, is_lab=False)
    return config


# --------------------------------------------------------------------------------------------------------------------
# plan and measurement

def measure(name: str, flags: str) -> dict[str, float]:
    """Plan and measured peak, in GiB, of two training steps in this process."""
    config, device = config_of(f"{SIZES} {flags}"), models.pick_device("auto")
    policy = models.load(name, device)._replace(eos_ids=())
    if config.lora_rank:
        lora.attach(policy.model, config.lora_rank, name, 0)
    if config.gradient_checkpointing:
        policy.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    dtype = models.pick_dtype(config.dtype, device)
    cast = partial(models.autocast, device, dtype)
    examples = [data.Example(f"What is {i} + {i}?", str(2 * i), str(i)) for i in range(20, 20 + config.prompts_per_step)]
    prompt = max(len(data.encode_prompt(policy, e.problem)) for e in examples)
    planned = memory.plan(policy.model, config, prompt, cast, dtype.itemsize)
    optimizer = make_optimizer(config.optimizer, policy.model, config.lr, 0.0)
    coin = itertools.cycle([True, False])
    train.is_correct = lambda text, gold: next(coin)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with PeakMemory() as grown:
        for step in (1, 2):
            train.train_step(policy, None, optimizer, examples, config, step, cast, lambda what: None)
    weights = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else weights + grown.mib * 2 ** 20
    return {**{part: value / memory.GIB for part, value in planned.items()}, "measured": peak / memory.GIB}


def compare(name: str) -> None:
    """Every setting in a process of its own; a table and the JSON file."""
    rows = {}
    print("| flags | weights | gradients | optimizer | activations | logits | sampling | attribution | plan | measured | plan / measured |")
    print("|---|" + "---|" * 10)
    for flags in SETTINGS:
        command = [sys.executable, "-m", "benchmarks.memory", "--model", name, "--one", flags]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"})
        if done.returncode:
            sys.exit(done.stderr)
        row = rows[flags] = json.loads(done.stdout.splitlines()[-1])
        values = [row[part] for part in row if part not in ("peak", "measured")]
        print(f"| `{flags}` | " + " | ".join(f"{v:.2f}" for v in values)
              + f" | {row['peak']:.2f} | {row['measured']:.2f} | {row['peak'] / row['measured']:.2f} |", flush=True)
        write_atomically(RESULT, json.dumps({"model": Path(name).name, "sizes": SIZES, "gib": rows}, indent=1) + "\n")


# --------------------------------------------------------------------------------------------------------------------
# a model that is not here

def build(shape: dict, rank: int):
    model = AutoModelForCausalLM.from_config(Qwen2Config(**shape))
    if rank:
        lora.attach(model, rank, "Qwen2.5-Math-1.5B", 0)
    return model


@lru_cache
def few_layers(layers: int, rank: int):
    return build({**QWEN, "num_hidden_layers": layers, "vocab_size": 256}, rank).eval()


def extrapolate(model, cast, float32: bool = False, rank: int = 0) -> tuple[float, float]:
    """`memory.saved_bytes` of a model that is not here, from one and two of its layers."""
    one, two = (memory.saved_bytes(few_layers(layers, rank), cast, float32) for layers in (1, 2))
    return tuple(a + (QWEN["num_hidden_layers"] - 1) * (b - a) for a, b in zip(one, two))


def table() -> None:
    """Peak by the plan of Qwen2.5-Math-1.5B, and the cards of which it leaves a tenth free."""
    cast = partial(models.autocast, torch.device("cpu"), torch.bfloat16)
    with torch.device("meta"):                       # the shape without its weights
        whole = {rank: build(QWEN, rank) for rank in (0, 16)}
    methods = ("grpo", "oar_g", "oar_p")
    print(f"| flags | {' | '.join(f'`{m}`' for m in methods)} |\n|---|" + "---|" * len(methods))
    for flags in RECIPES:
        cells = []
        for method in methods:
            config = config_of(f"--method {method} {flags}")
            count = partial(extrapolate, rank=config.lora_rank)
            peak = memory.plan(whole[config.lora_rank], config, PROMPT, cast, 2, count)["peak"] / memory.GIB
            cards = [f"{card}" for card in CARDS if peak < 0.9 * card * 1e9 / memory.GIB]
            cells.append(f"{peak:.0f} GiB: {', '.join(cards) or 'none'}")
        print(f"| `{flags or '(defaults)'}` | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="A .gguf file, a folder or a hub id.")
    parser.add_argument("--one", metavar="FLAGS", help="Measure this one setting in this process and print JSON.")
    parser.add_argument("--table", action="store_true", help="The plan of Qwen2.5-Math-1.5B for several cards.")
    args = parser.parse_args()
    if args.table:
        table()
    elif args.model and args.one:
        print(json.dumps(measure(args.model, args.one)))
    elif args.model:
        compare(args.model)
    else:
        parser.error("give --model or --table")


if __name__ == "__main__":
    main()
