"""LoRA: only the adapter is trained, a run resumes to the bit, everybody else gets it merged; the optimisers by name."""
import shutil
import sys

import pytest
import torch
from conftest import ROOT, tiny_model
from test_train import records, run

import train
from oar import lora, models
from oar.attribution import attribute
from oar.errors import UserError
from oar.optimizer import make_optimizer

pytest.importorskip("peft", reason="peft is not installed (requirements-dev.txt)")
CPU = torch.device("cpu")


def test_the_adapter_starts_at_nothing_and_is_all_that_is_trained():
    model, plain, ids = tiny_model("llama"), tiny_model("llama"), torch.arange(6, 18)[None]
    random_state = torch.get_rng_state()
    lora.attach(model, 2, "tiny", seed=1)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits) and type(model) is type(plain)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained) and not any("lm_head" in name for name in trained)
    again = tiny_model("llama")
    lora.attach(again, 2, "tiny", seed=1)
    assert all(torch.equal(p, dict(again.named_parameters())[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("method", ["oar_tg", "oar_p"])
def test_resumed_lora_run_equals_uninterrupted_run(tmp_path, method):
    flags = ["--lora-rank", "4", "--lr", "1e-3", "--method", method]
    whole, cut = run(tmp_path, *flags, name="whole"), run(tmp_path, *flags, name="cut")
    shutil.rmtree(cut / "checkpoints" / "step_000004")
    sys.argv = ["train.py", "--resume", str(cut), "--quiet"]
    train.main()
    assert records(cut) == records(whole)
    saved = [(folder / "checkpoints/step_000004/adapter_model.safetensors").read_bytes() for folder in (whole, cut)]
    assert saved[0] == saved[1] and len(saved[0]) < 200_000                          # the adapter, not the model


def test_a_run_loads_merged(tmp_path):
    """evaluate.py and attribute.py read a LoRA run as any other: the adapter is in the weights."""
    folder = run(tmp_path, "--lora-rank", "4", "--lr", "1e-2", "--method", "grpo")
    merged, base = models.load(str(folder), CPU), models.load("lab", CPU)
    assert merged.is_lab and type(merged.model) is type(base.model) and not hasattr(merged.model, "peft_config")
    adapted = models.load("lab", CPU)
    lora.attach(adapted.model, 4, "lab", 0, folder / "checkpoints/step_000004")
    ids = torch.arange(6, 18)[None]
    with torch.no_grad():
        found, want, start = (p.model(input_ids=ids).logits for p in (merged, adapted, base))
    assert torch.allclose(found, want, atol=1e-4) and not torch.allclose(found, start, atol=1e-2)
    assert attribute(merged, "x 3 y 5 ; x + 4 ?", "so x : 3 + 4 = 7 ; #### 7 5", methods=["oar_tg"]).tokens


def test_missing_packages_are_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UserError, match="--optimizer adamw8bit: needs the package bitsandbytes"):
        make_optimizer("adamw8bit", tiny_model("llama"), 1e-3, 0.0)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="--lora-rank 2: needs the package peft"):
        lora.attach(tiny_model("llama"), 2, "tiny", 0)


def test_adafactor_run_resumes(tmp_path):
    whole, cut = (run(tmp_path, "--optimizer", "adafactor", "--method", "grpo", name=name) for name in ("whole", "cut"))
    shutil.rmtree(cut / "checkpoints" / "step_000004")
    sys.argv = ["train.py", "--resume", str(cut), "--quiet"]
    train.main()
    first, second = (models.load(str(folder), CPU).model.state_dict() for folder in (whole, cut))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_extras_of_the_package_are_named_once():
    """pyproject.toml takes its dependencies from requirements.txt, so the two cannot disagree."""
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dependencies = { file = ["requirements.txt"] }' in text and "torch" not in text
