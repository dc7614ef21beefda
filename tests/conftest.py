"""Tiny random models of three families and hand-made batches: every test runs on a CPU without a download."""
import random
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from oar import lab                                    # noqa: E402
from oar.batch import Batch, pad                       # noqa: E402
from oar.models import Policy                          # noqa: E402

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs so, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = ROOT.parent / "shared"
FAMILIES = ("gpt2", "llama", "qwen2")
V = len(lab.VOCABULARY)
PAD_ID, EOS_ID = 0, 1


def tiny_model(family: str, seed: int = 0, dropout: float = 0.0):
    """A two-layer model over the lab's vocabulary; weights large enough for the outcome to depend on every token."""
    torch.manual_seed(seed)
    common = dict(vocab_size=V, pad_token_id=PAD_ID, eos_token_id=EOS_ID, bos_token_id=None, initializer_range=0.3)
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=256, embd_pdrop=dropout,
                                           resid_pdrop=dropout, attn_pdrop=dropout, **common))
    else:
        config, kind = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[family]
        model = kind(config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                            max_position_embeddings=256, tie_word_embeddings=family == "qwen2", **common))
    return model.eval()


@pytest.fixture(params=FAMILIES)
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="session")
def tokenizer():
    return lab.build_tokenizer()


@pytest.fixture
def policy(model, tokenizer):
    return Policy(model, tokenizer, (EOS_ID,), True)


def make_batch(prompts: list[list[int]], completions: list[list[int]], tokenizer) -> Batch:
    """A Batch from token lists; sampler log-probs 0, entropy a fixed pattern."""
    prompt_ids, prompt_mask = pad(prompts, "left", PAD_ID, "cpu")
    ids, mask = pad(completions, "right", PAD_ID, "cpu")
    entropy = torch.linspace(0, 1, mask.numel()).view(mask.shape) * mask
    finished = torch.tensor([bool(c) and c[-1] == EOS_ID for c in completions])
    return Batch(prompt_ids, prompt_mask, ids, mask, torch.zeros(mask.shape), entropy, finished,
                 [tokenizer.decode(c, skip_special_tokens=True) for c in completions])


@pytest.fixture
def lab_batch(tokenizer):
    """Four completions of different lengths behind prompts of different lengths; the third never answers."""
    rng = random.Random(3)
    prompts, completions = [], []
    for row, instructions in enumerate((1, 2, 2, 1)):
        problem = lab.random_problem(rng, instructions)
        trace = lab.write_trace(problem, rng, fillers=row, sloppiness=0.5)
        prompts.append(tokenizer.encode(problem.text()))
        completions.append(tokenizer.encode(trace.split(" ####")[0] if row == 2 else trace))
    return make_batch(prompts, completions, tokenizer)


@pytest.fixture(scope="session")
def shared():
    if not SHARED.is_dir():
        pytest.skip("needs ../shared, which is not there")
    return SHARED
