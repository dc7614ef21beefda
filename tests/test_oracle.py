"""The oracle against a serial reference that shares nothing, on the real lab policy, and verdicts known by construction."""
import copy
import random

import pytest
import torch
from conftest import EOS_ID, make_batch

from oar import lab, models, oracle
from oar.batch import random_stream
from oar.probe import Segments, segment
from oar.rollout import draw_uniforms, sample
from oar.verify import is_correct

MAX_NEW, PROBLEM = 70, "x 3 y 5 ; x + 4 ; y + 1 ; x - 2 ; y + 3 ?"


@pytest.fixture(scope="module")
def lab_policy():
    return models.load("lab", torch.device("cpu"))


@pytest.fixture(scope="module")
def sampled(lab_policy):
    """Seven sampled completions of lab problems, right and wrong ones, and their golds."""
    rng = random.Random(5)
    problems = [lab.random_problem(rng, split="validation") for _ in range(7)]
    prompts = [lab_policy.tokenizer.encode(p.text()) for p in problems]
    batch = sample(lab_policy, prompts, 1, MAX_NEW, draw_uniforms(7, MAX_NEW, random_stream("oracle")))
    return batch, [lab.execute(p)[1] for p in problems]


def segments_of(policy, batch):
    return [segment(policy.tokenizer, batch.row_ids(row), policy.eos_ids) for row in range(len(batch))]


def causal(policy, batch, golds, regenerate, budget=10 ** 6, longest=MAX_NEW):
    return oracle.causal_tokens(policy, batch, segments_of(policy, batch), golds, regenerate, longest, budget)


@torch.no_grad()
def reference_right(policy, prompt, completion, gold, room):
    """Whether greedy decoding after prompt + completion ends in the right answer: whole sequence anew for every token."""
    completion = list(completion)
    while room > 0 and completion[-1] not in policy.eos_ids:
        logits = policy.model(input_ids=torch.tensor([prompt + completion])).logits[0, -1]
        completion.append(int(logits.argmax()))
        room -= 1
    return is_correct(policy.tokenizer.decode(completion, skip_special_tokens=True), gold)


@torch.no_grad()
def reference(policy, batch, golds, regenerate, longest=MAX_NEW, every=1):
    """The definition, `every` so many tokens, with the control decoded for every token too."""
    result = torch.zeros_like(batch.completion_mask)
    for row, cut in enumerate(segments_of(policy, batch)):
        ids, prompt = batch.row_ids(row), batch.prompt_ids[row][batch.prompt_mask[row]].tolist()
        if not is_correct(batch.texts[row], golds[row]):
            continue
        for t in range(0, cut.reasoning_end, every):
            logits = policy.model(input_ids=torch.tensor([prompt + ids[:t]])).logits[0, -1]
            logits[ids[t]] = -torch.inf
            rest = ids[t + 1:cut.answer_start] if regenerate == "answer" else []
            room = longest - t - 1 if regenerate == "all" else cut.answer_end - cut.answer_start + oracle.ANSWER_ROOM
            right = [reference_right(policy, prompt, ids[:t] + [token] + rest, golds[row], room)
                     for token in (ids[t], int(logits.argmax()))]
            result[row, t] = right[0] and not right[1]
    return result


@pytest.mark.parametrize("regenerate", oracle.ORACLES)
def test_equals_the_serial_definition(lab_policy, sampled, regenerate):
    batch, golds = sampled
    rows = [row for row in range(7) if is_correct(batch.texts[row], golds[row])][:2 if regenerate == "answer" else 1]
    part, golds = batch.rows(rows), [golds[row] for row in rows]
    every = 1 if regenerate == "answer" else 3
    expected = reference(lab_policy, part, golds, regenerate, every=every)[:, ::every]
    assert expected.any() and not expected.all()
    assert torch.equal(causal(lab_policy, part, golds, regenerate)[:, ::every], expected)


@pytest.mark.parametrize("regenerate", oracle.ORACLES)
def test_wrong_completions_have_no_causal_tokens(lab_policy, sampled, regenerate):
    batch, golds = sampled
    marks = causal(lab_policy, batch, golds, regenerate)
    right = torch.tensor([is_correct(text, gold) for text, gold in zip(batch.texts, golds)])
    assert 0 < right.sum() < 7 and not marks[~right].any() and marks[right].any()
    ends = torch.tensor([s.reasoning_end for s in segments_of(lab_policy, batch)])
    assert not (marks & (torch.arange(marks.shape[1]) >= ends[:, None])).any()       # reasoning tokens only
    assert not causal(lab_policy, batch, ["1 2 3"] * 7, regenerate).any()


@pytest.mark.parametrize("regenerate", oracle.ORACLES)
def test_budget_and_batch_composition_do_not_matter(lab_policy, sampled, regenerate):
    batch, golds = sampled
    rows = sorted(range(7), key=lambda row: not is_correct(batch.texts[row], golds[row]))[:1] + [6]
    batch, golds = batch.rows(rows), [golds[row] for row in rows]
    whole = causal(lab_policy, batch, golds, regenerate)
    assert whole.any() and torch.equal(causal(lab_policy, batch, golds, regenerate, budget=900), whole)
    part = causal(lab_policy, batch.rows([1, 0]), [golds[1], golds[0]], regenerate)
    assert torch.equal(part, whole[[1, 0]][:, :part.shape[1]])


def test_known_roles_of_a_clean_trace(lab_policy):
    """Direct effect: the answer copies the last result of either register and nothing before it, fillers least of all.
    Total effect: any result changes what follows."""
    problem = lab.parse_problem(PROBLEM)
    text = lab.write_trace(problem, random.Random(0), sloppiness=0.0)
    batch = make_batch([lab_policy.tokenizer.encode(problem.text())], [lab_policy.tokenizer.encode(text)], lab_policy.tokenizer)
    roles = lab.label_tokens(problem, text.split())
    results = [t for t, role in enumerate(roles) if role.kind == "result"]
    fillers = [t for t, role in enumerate(roles) if role.kind == "filler"]
    marks = {how: causal(lab_policy, batch, ["5 9"], how)[0] for how in oracle.ORACLES}
    assert marks["all"][results].all() and marks["answer"][results].tolist() == [False, False, True, True]
    assert marks["answer"][fillers].sum() == 0 and marks["all"][fillers].sum() <= 1


@pytest.mark.parametrize("regenerate", oracle.ORACLES)
def test_every_model_family_and_state_untouched(model, policy, lab_batch, tokenizer, regenerate):
    """Random models behind left padding, absolute positions included: the serial definition again, nothing changed."""
    model.train()
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    golds = [text.split("#### ")[-1] for text in lab_batch.texts]
    marks = causal(policy, lab_batch, golds, regenerate, longest=28)
    assert model.training and torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    assert torch.equal(marks, reference(policy, lab_batch, golds, regenerate, longest=28))


def test_control_keeps_fragile_completions_out(policy, lab_batch):
    """A random model does not find the answer again by itself, so nothing can be called causal."""
    golds = [text.split("#### ")[-1] for text in lab_batch.texts]
    assert not causal(policy, lab_batch, golds, "answer")[0].any()


def test_trials_stop_at_the_end_mark_and_at_the_limit(lab_policy):
    words = f"so x : 3 + 4 = 7 ; #### 7 5 {lab.EOS}"
    ids = lab_policy.tokenizer.encode(words)
    cut = segment(lab_policy.tokenizer, ids, (EOS_ID,))
    other = [EOS_ID] * len(ids)
    trials = oracle.plan_trials(0, ids, cut, ids, other, "all", 20, {EOS_ID})
    assert all(trials[0, t, False].room == 0 for t in range(cut.reasoning_end))      # nothing is decoded after the end mark
    assert [name for name in trials if name[2]] == [(0, cut.reasoning_end - 1, True)]     # ids are the greedy choices: one control
    trials = oracle.plan_trials(0, ids, cut, ids, ids, "all", 20, {EOS_ID})
    assert [trials[0, t, False].room for t in range(3)] == [19, 18, 17]


def test_an_answer_nobody_marked_has_no_causal_tokens(lab_policy):
    """Right or not, there is no conclusion to keep or to find again."""
    batch = make_batch([lab_policy.tokenizer.encode(PROBLEM)], [lab_policy.tokenizer.encode("so so #### 7 5")], lab_policy.tokenizer)
    unmarked = [Segments(5, 5, 5, False)]
    assert is_correct(batch.texts[0], "7 5")
    for how in oracle.ORACLES:
        assert not oracle.causal_tokens(lab_policy, batch, unmarked, ["7 5"], how, MAX_NEW, 10 ** 6).any()


def test_stop_strings_end_a_continuation(lab_policy, sampled):
    """With every filler's neighbour a stop, the answer is never reached; a stop string itself is not kept."""
    batch, golds = sampled
    right = next(row for row in range(7) if is_correct(batch.texts[row], golds[row]))
    part = batch.rows([right])
    cache, _, _ = oracle.read_clean(lab_policy.model, part)
    trial = oracle.Trial(0, 5, part.row_ids(0)[5:6], 40)
    whole, = oracle.continue_greedily(lab_policy, part, cache, [trial], [])
    cut, = oracle.continue_greedily(lab_policy, part, cache, [trial], ["="])
    text = lab_policy.tokenizer.decode(whole)
    assert "=" in text and lab_policy.tokenizer.decode(cut) == text[:text.index("=")].rstrip() and whole[:len(cut)] == cut
