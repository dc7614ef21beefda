"""Where the memory of a training step goes, and what to change when it does not fit.

    always        weights (float32) + the reference's with --kl-beta + optimiser state
    sampling      + key-value cache of all completions + a few (B, V) tensors
    attribution   + graph of one pass of --tokens-per-pass tokens (oar_g, oar_f, oar_tg), or caches (oar_p, oar_t)
    update        + gradients + graph of one pass + logits of its completion tokens

The largest of the three phases is the peak.  What autograd keeps per token is not derived but counted: two short forwards
are run and the tensors that they save are added up (`saved_bytes`), so any architecture, adapters and autocast included,
tells it by itself.  Fragmentation of the allocator, the CUDA context (about 0.5 GiB) and short-lived tensors inside a
layer come on top: leave a tenth of the device free.

    python -m benchmarks.memory          # plan against measurement, and the README's table
"""
import os
from functools import lru_cache

import torch
from torch.func import functional_call

from oar.grpo import LOGIT_ROWS
from oar.optimizer import state_bytes

GIB = 2 ** 30
ANSWER_TOKENS = 8            # assumed length of a final answer, whose logits attribution keeps
GRAPH_METHODS = ("oar_g", "oar_f", "oar_tg")
CACHE_METHODS = ("oar_p", "oar_t", "inverted")


@lru_cache(maxsize=8)
def saved_bytes(model, cast, float32: bool = False) -> tuple[float, float]:
    """(bytes per token, bytes once) that a forward of the body keeps for the backward pass, under autocast `cast`.

    `float32` counts OAR-G's forward: no autocast, and gradients of the input embeddings only.
    """
    known = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    body, counts = model.base_model, {}

    def count(length: int) -> int:
        kept = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        ids = torch.arange(2 * length, device=model.device).view(2, length) % model.config.get_text_config().vocab_size
        mask = torch.ones_like(ids)
        mask[0, 0] = 0                               # a padded row, as in training: the kernel then gets a mask
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if float32:
                embeds = model.get_input_embeddings()(ids).detach().requires_grad_(True)
                weights = {name: p.detach() for name, p in body.named_parameters()}
                out = functional_call(body, weights, kwargs={"inputs_embeds": embeds, "attention_mask": mask, "use_cache": False})
            else:
                with cast():
                    out = body(input_ids=ids, attention_mask=mask, use_cache=False)
        del out
        return sum(kept.values())

    short, long = (count(length) for length in (32, 96))
    per_token = (long - short) / 128
    return per_token, max(0.0, short - 64 * per_token)


def cache_bytes(model, bytes_per_pair: int) -> int:
    """Keys and values of one token, all layers; a pair is one number of a key and one of a value."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers * heads * width * bytes_per_pair


def plan(model, config, prompt_tokens: int, cast, compute_bytes: int, count=saved_bytes) -> dict[str, float]:
    """Bytes by purpose, and "peak"; `config` as in train.py, `compute_bytes` 2 under bfloat16 autocast and else 4.

    `count` stands in for `saved_bytes` where the model is a shape without weights.
    """
    text = model.config.get_text_config()
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) * (2 if config.kl_beta else 1)
    gradients = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    state = state_bytes(config.optimizer, model)
    length = prompt_tokens + config.max_new_tokens
    completions = config.prompts_per_step * config.group_size
    rows = min(completions, max(1, config.tokens_per_pass // length))                # completions of one pass
    graph, once = count(model, cast)
    pair = 8 if compute_bytes == 4 else 6            # under autocast rotary embeddings leave the keys in float32
    cache = cache_bytes(model, pair)

    sampling = completions * (length * cache + 6 * 4 * text.vocab_size)
    activations = once + rows * length * graph
    if config.gradient_checkpointing:                # the input of every layer, and one layer in full
        activations = once / (text.num_hidden_layers if config.lora_rank else 1)     # cached casts are of trained weights only
        activations += rows * length * (text.num_hidden_layers * text.hidden_size * 4 + graph / text.num_hidden_layers)
    tokens = rows * config.max_new_tokens            # (N, V): logits and their gradient; three float32 chunks in its formula
    logits = 2 * tokens * text.vocab_size * compute_bytes + 3 * min(tokens, LOGIT_ROWS) * text.vocab_size * 4
    logits += 2 * text.vocab_size * text.hidden_size if compute_bytes == 2 else 0    # the head's cast
    if config.method == "oar_g":
        graph, once = count(model, None, float32=True)
    attribution = attribution_bytes(model, config, rows, length, graph, once, cache)
    # a later pass makes the gradient of every weight anew and adds it; with one pass the graph goes while gradients come
    newest = max((4 * p.numel() for p in model.parameters() if p.requires_grad), default=0)
    update = gradients + newest + activations + logits if rows < completions else max(gradients, activations + logits)
    peak = weights + state + max(sampling, attribution, update)
    return {"weights": weights, "gradients": gradients, "optimizer": state, "activations": activations, "logits": logits,
            "sampling": sampling, "attribution": attribution, "peak": peak}


def attribution_bytes(model, config, rows: int, length: int, graph: float, once: float, cache: int) -> float:
    """What attribution needs beyond weights and optimiser state."""
    answer = 6 * 4 * rows * ANSWER_TOKENS * model.config.get_text_config().vocab_size
    if config.method in GRAPH_METHODS:
        return once + rows * length * graph + answer
    if config.method in CACHE_METHODS:               # clean cache, its copy behind the disturbed tokens, one layer growing
        return 2 * rows * length * cache + answer
    return 0.0


def available_bytes(device: torch.device) -> float | None:
    """Memory of the device (of the machine for the CPU); None where it cannot be asked."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def describe(parts: dict[str, float], available: float | None) -> str:
    """The plan to print; `available` is the device's memory in bytes, None when it is not known."""
    listed = ", ".join(f"{name} {value / 2 ** 20:.0f}" for name, value in parts.items() if name != "peak")
    text = f"memory plan, MiB: {listed}; peak about {parts['peak'] / 2 ** 20:.0f}"
    if available is not None and parts["peak"] > 0.9 * available:
        text += f"\nthis may not fit in {available / GIB:.0f} GiB: {advice(parts)}"
    return text


def advice(parts: dict[str, float]) -> str:
    """The flags that help most, the largest part first."""
    remedies = {"gradients": "--lora-rank 16", "optimizer": "--optimizer adafactor or --lora-rank 16",
                "activations": "--gradient-checkpointing or a smaller --tokens-per-pass", "logits": "a smaller --tokens-per-pass",
                "sampling": "a smaller --prompts-per-step, --group-size or --max-new-tokens",
                "attribution": "a smaller --tokens-per-pass, or --method oar_p, which keeps no graph"}
    largest = sorted(remedies, key=lambda name: -parts[name])[:3]
    return "try " + "; ".join(remedies[name] for name in largest)
