"""The memory plan: what autograd keeps, how the parts add up, and the advice."""
import sys
from contextlib import nullcontext

import pytest
import torch
from conftest import tiny_model

import train
from oar import memory
from oar.config import Config, apply_preset
from oar.optimizer import make_optimizer, state_bytes


def settings(**changes):
    sizes = dict(prompts_per_step=2, group_size=4, max_new_tokens=20, tokens_per_pass=60)
    config = Config(model="x", data="x.jsonl", **{**sizes, **changes})
    apply_preset(config, is_lab=False)
    return config


def plan(model=None, **changes):
    return memory.plan(model or tiny_model("llama"), settings(**changes), 10, nullcontext, 4)


def test_saved_bytes_are_those_of_a_linear_chain():
    """Counted by hand for a Llama layer in float32: two norms, attention with expanded heads, the gated feed-forward."""
    model = tiny_model("llama")
    per_token, once = memory.saved_bytes(model, nullcontext)
    h, i, layers = 32, 64, 2
    # twice x, x/rms, w x/rms; q, k, v, o; gate, silu, up, product; the last norm
    by_hand = 4 * (layers * ((3 + 3) * h + 4 * h + 4 * i) + 3 * h)
    assert by_hand * 0.9 < per_token < by_hand * 1.4                                 # rotary tables, masks and ids come on top
    assert 0 <= once < 20000
    inputs_only, _ = memory.saved_bytes(model, None, float32=True)
    assert inputs_only < 0.8 * per_token                                             # nothing is kept for gradients of weights


def test_counting_leaves_no_trace():
    model = tiny_model("qwen2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    memory.saved_bytes(model, nullcontext)
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parts_and_peak():
    model = tiny_model("llama")
    n = sum(p.numel() for p in model.parameters())
    parts = plan(model, method="grpo")
    assert parts["weights"] == parts["gradients"] == 4 * n and parts["optimizer"] == 8 * n and parts["attribution"] == 0
    newest = 4 * max(p.numel() for p in model.parameters())
    update = parts["gradients"] + newest + parts["activations"] + parts["logits"]
    assert parts["peak"] == parts["weights"] + parts["optimizer"] + max(parts["sampling"], update)
    assert plan(model, method="grpo", kl_beta=0.1)["weights"] == 8 * n


@pytest.mark.parametrize("part, changes", [
    ("activations", dict(tokens_per_pass=30)), ("activations", dict(gradient_checkpointing=True)),
    ("logits", dict(tokens_per_pass=30)),
    ("sampling", dict(group_size=2)), ("attribution", dict(tokens_per_pass=30)), ("optimizer", dict(optimizer="adafactor")),
    ("optimizer", dict(optimizer="adamw8bit")),
])
def test_every_remedy_helps(part, changes):
    assert plan(method="oar_g", **changes)[part] < plan(method="oar_g")[part]


def test_advice_names_the_largest_parts():
    parts = dict(weights=6, gradients=5, optimizer=12, activations=20, logits=1, sampling=2, attribution=0, peak=44)
    text = memory.describe({name: value * memory.GIB for name, value in parts.items()}, 24 * memory.GIB)
    assert "peak about 45056" in text and "may not fit in 24 GiB" in text
    assert "--gradient-checkpointing" in text and "--optimizer adafactor" in text
    assert "may not fit" not in memory.describe({name: value * memory.GIB for name, value in parts.items()}, 80 * memory.GIB)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_optimizer_state_is_as_planned(name):
    model = tiny_model("qwen2")
    optimizer = make_optimizer(name, model, 1e-3, 0.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = sum(v.numel() * 4 for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.dim())
    assert kept == state_bytes(name, model)


def test_train_prints_its_plan_before_the_first_step(tmp_path, monkeypatch, capsys):
    flags = "--method grpo --steps 1 --prompts-per-step 1 --group-size 2 --max-new-tokens 8 --validation-size 0 --device cpu"
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split(), "--out", str(tmp_path / "run")])
    train.main()
    text = capsys.readouterr().out
    assert text.index("run folder") < text.index("memory plan, MiB: weights 2, gradients 2, optimizer 5") < text.index("peak memory")
