"""Hostile completions through the whole training step: nothing crashes, hangs, poisons a number or reaches a terminal."""
import json
import re
from contextlib import nullcontext

import pytest
import torch
from conftest import make_batch
from tokenizers import Tokenizer, decoders, models as token_models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import train
from oar import checkpoint, data
from oar.attribution import Attribution
from oar.config import Config, apply_preset
from oar.credit import METHODS
from oar.heatmap import page, terminal
from oar.models import Policy

DIGITS = "7" * 12_500                                # one token of the vocabulary; 80 of them make a million digits
BEYOND = 290                                         # an id that the model can sample and the tokenizer does not know


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(token_models.BPE({c: i + 2 for i, c in enumerate(alphabet)} | {"<pad>": 0, "<eos>": 1}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False)
    tokenizer.add_tokens([DIGITS])
    return tokenizer


@pytest.fixture(scope="module")
def hostile():
    """(policy, completions as token ids)."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                         pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.2)).eval()
    eos, digits = [1], [tokenizer.convert_tokens_to_ids(DIGITS)]
    texts = ["\\boxed{" * 30, "}" * 30 + "\\boxed{4}", "{" * 60, "\\boxed{4}}}}}", "\\boxed{{{{4}",
             "\x00\x07\x1b[31m\x1b]0;title\x07\x9b2J #### 4", "\u202e\u2066 \u200f#### 4 \u2069\u2028\u2029", "<script>alert(1)</script> \\boxed{4}",
             "\\boxed{9^{9^{9^{9}}}}", "#### 1/0", "\\boxed{" + "9" * 120 + "}", "#### 4"]
    rows = [tokenizer.encode(text) + eos for text in texts]
    rows += [[], eos, tokenizer.encode("going on and on " * 12), digits * 80 + eos, tokenizer.encode("\\boxed{") + digits * 80 + tokenizer.encode("}") + eos,
             [200, 140, 255, 2, 199] * 4 + eos, [BEYOND] * 9 + eos, tokenizer.encode("#### ") + [BEYOND] + eos]
    return Policy(model, tokenizer, (1,), False), rows


def step_of(policy, rows, method, monkeypatch):
    def scripted(policy, prompts, group_size, *args, **options):
        batch = make_batch([prompts[i // group_size] for i in range(len(rows))], rows, policy.tokenizer)
        return batch

    monkeypatch.setattr(train, "sample_in_parts", scripted)
    config = Config(method=method, model="m", data="p.jsonl", prompts_per_step=2, group_size=len(rows) // 2, max_new_tokens=300)
    apply_preset(config, is_lab=False)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-4)
    examples = [data.Example("What is 2 + 2? \u202e <b>", "4", "a"), data.Example("What is 3 + 1?", "4", "b")]
    return train.train_step(policy, None, optimizer, examples, config, 1, nullcontext, lambda what: None)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "roles"])
def test_a_training_step_of_hostile_completions(hostile, method, monkeypatch, tmp_path):
    policy, rows = hostile
    line, samples = step_of(policy, rows, method, monkeypatch)
    assert line["skipped"] is None and line["dropped"] == 0 and 0 < line["reward"] < 1 and 0 < line["grad_norm"] < 1e4
    assert all(value is None or isinstance(value, str) or value == value for value in line.values())
    assert all(p.isfinite().all() for p in policy.model.parameters())
    checkpoint.append_jsonl(tmp_path / "samples.jsonl", *samples, line)
    assert checkpoint.read_records(tmp_path / "samples.jsonl") == [*samples, line]


def test_records_hold_no_character_that_could_act(tmp_path):
    evil = {"step": 1, "text": "".join(map(chr, [*range(32), 0x7f, 0x9b, 0x85, 0x200f, 0x2028, 0x2029, 0x202e, 0x2066, 0xfeff])) + "\ud800é数"}
    checkpoint.append_jsonl(tmp_path / "samples.jsonl", evil)
    written = (tmp_path / "samples.jsonl").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200f\u2028-\u202e\u2066\ufeff\ud800]", written) and "é数" in written
    assert written.count("\n") == len(written.splitlines()) == 1 and checkpoint.read_records(tmp_path / "samples.jsonl") == [evil]
    assert json.loads(written) == evil


def test_terminal_and_page_escape_what_the_step_kept(hostile, monkeypatch):
    policy, rows = hostile
    _, samples = step_of(policy, rows, "entropy", monkeypatch)
    for sample in samples:
        n = len(sample["tokens"])
        shown = Attribution(sample["problem"], "4", sample["tokens"], ["reasoning"] * n, [""] * n, {"entropy": sample["importance"]},
                            {"entropy": sample["weights"]}, None)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", terminal(shown, False, 80))
        assert "<script>alert" not in page([shown], sample["text"], "none") and "\u202e" not in page([shown], sample["text"], "none")
