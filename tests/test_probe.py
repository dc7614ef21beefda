"""Segmentation on sampled ids, and the three outcome probes against closed forms."""
import math

import pytest
import torch
from conftest import EOS_ID, PAD_ID, make_batch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oar.probe import Probe, build_probe, divergence, forced_targets, outcome, probe_logits, segment


@pytest.fixture(scope="session")
def byte_tokenizer():
    """One token per UTF-8 byte: characters outside ASCII take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def spans(tokenizer, text, eos_ids=(EOS_ID,)):
    ids = tokenizer.encode(text)
    s = segment(tokenizer, ids, eos_ids)
    parts = [ids[:s.reasoning_end], ids[s.reasoning_end:s.answer_start], ids[s.answer_start:s.answer_end], ids[s.answer_end:]]
    return [tokenizer.decode(part) for part in parts], s.answered


def test_lab_segments(tokenizer):
    assert spans(tokenizer, "so x : 3 + 4 = 7 ; #### 7 5 <eos>") == (["so x : 3 + 4 = 7 ;", "####", "7 5", "<eos>"], True)


def test_last_marker_counts(tokenizer):
    assert spans(tokenizer, "#### 1 2 so #### 3 4 <eos>")[0] == ["#### 1 2 so", "####", "3 4", "<eos>"]


def test_boxed_segments_by_bytes(byte_tokenizer):
    parts, answered = spans(byte_tokenizer, "Então π ≈ 3 → so \\boxed{7½} ✓.")
    assert parts == ["Então π ≈ 3 → so ", "\\boxed{", "7½", "} ✓."] and answered


def test_no_answer_is_all_reasoning(tokenizer):
    assert spans(tokenizer, "so x : 3 + <eos>") == (["so x : 3 +", "", "", "<eos>"], False)
    assert spans(tokenizer, "so ####") == (["so ####", "", "", ""], False)


def test_empty_and_zero_length_reasoning(tokenizer):
    assert segment(tokenizer, [], (EOS_ID,)) == (0, 0, 0, False)
    assert segment(tokenizer, [EOS_ID], (EOS_ID,)) == (0, 0, 0, False)
    assert spans(tokenizer, "#### 7 5")[0] == ["", "####", "7 5", ""]


def test_marker_and_answer_in_one_token():
    core = Tokenizer(models.WordLevel({"so": 0, "\\boxed{7}": 1, "!": 2}, unk_token="!"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    assert segment(tokenizer, [0, 1, 2]) == (1, 1, 2, True)


def probe_of(tokenizer, texts, kind, prompts=None):
    batch = make_batch(prompts or [[12, 5]] * len(texts), [tokenizer.encode(t) for t in texts], tokenizer)
    segments = [segment(tokenizer, batch.row_ids(row), (EOS_ID,)) for row in range(len(batch))]
    return build_probe(batch, segments, kind, tokenizer.encode("####"), PAD_ID)


def test_probe_positions_and_targets(tokenizer):
    probe = probe_of(tokenizer, ["so #### 7 5 <eos>", "so so so"], "answer_mean")
    # row 0: P = 2, "so" in column 2, "####" in 3, "7" in 4 (the last answer token is a target only)
    assert probe.positions.tolist()[0] == [3, 4] and probe.targets.tolist()[0] == tokenizer.encode("7 5")
    # row 1: no answer, so the forced "####" sits in column 5 and the probe is read there
    assert probe.position_mask.tolist() == [[True, True], [True, False]] and probe.positions[1, 0] == 5
    assert probe.targets[1, 0] == -1 and tokenizer.decode(probe.ids[1, 2:]) == "so so so ####"
    assert probe.reasoning_mask.tolist() == [[True, False, False, False], [True, True, True, False]]
    last = probe_of(tokenizer, ["so #### 7 5 <eos>"], "last")
    assert last.positions.tolist() == [[3]] and last.ids.shape == (1, 4)


def fake_probe(kind, mask, targets):
    mask, blank = torch.tensor(mask), torch.zeros(1, 1, dtype=torch.long)
    return Probe(kind, blank, blank.bool(), 0, blank.bool(), torch.zeros_like(mask, dtype=torch.long), mask, torch.tensor(targets))


def test_outcomes_closed_form():
    logits = torch.log(torch.tensor([[[0.5, 0.5], [0.9, 0.1], [0.001, 0.999]]]))          # the third position is padding
    mean = outcome(logits, fake_probe("answer_mean", [[True, True, False]], [[0, 1, 0]])).exp()
    a, b = math.sqrt(0.5 * 0.9), math.sqrt(0.5 * 0.1)                                     # mean of logits = geometric mean
    assert mean[0].tolist() == pytest.approx([a / (a + b), b / (a + b)])
    joint = outcome(logits, fake_probe("answer_joint", [[True, True, False]], [[0, 1, 0]]))
    assert joint.item() == pytest.approx((math.log(0.5) + math.log(0.1)) / 2)


def test_divergence_closed_form():
    p, q = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert divergence(p, q, "answer_mean").item() == pytest.approx(kl)
    assert divergence(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), "answer_joint").item() == 2.0


@pytest.mark.parametrize("kind", ["last", "answer_mean", "answer_joint"])
def test_infinite_logits_give_finite_values_and_gradients(kind):
    clean = torch.tensor([[[1.0, -torch.inf, 0.5]]])
    disturbed = torch.tensor([[[0.0, -torch.inf, 1.0]]], requires_grad=True)
    probe = fake_probe(kind, [[True]], [[0]])
    moved = divergence(outcome(clean, probe), outcome(disturbed, probe), kind).sum()
    moved.backward()
    assert moved.isfinite() and moved != 0 and disturbed.grad.isfinite().all()


def test_forced_target_is_the_likeliest_token(tokenizer):
    probe = probe_of(tokenizer, ["so so"], "answer_joint")
    logits = torch.zeros(1, 1, 36)
    logits[0, 0, 9] = 5.0
    assert forced_targets(probe, logits).targets.tolist() == [[9]]


def test_probe_logits_are_the_full_logits_at_the_positions(model, tokenizer):
    probe = probe_of(tokenizer, ["so so #### 7 5 <eos>", "so #### 7 5"], "answer_mean", [[12, 5], [12, 5, 13, 6, 19]])
    ours = probe_logits(model, probe)
    for row in range(2):
        alone = model(probe.ids[row][probe.mask[row]][None]).logits[0]
        left = int((~probe.mask[row, :probe.prompt_width]).sum())
        assert torch.allclose(ours[row], alone[probe.positions[row] - left], atol=2e-5)
