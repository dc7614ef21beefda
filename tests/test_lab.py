"""The lab: programs, slicing, roles, disjoint splits, and the committed warm-start policy."""
import random

import pytest
import torch
from conftest import EOS_ID

from oar import data, lab, models
from oar.batch import random_stream
from oar.rollout import draw_uniforms, sample
from oar.verify import is_correct

PROGRAM = "x 3 y 5 ; x + 4 ; y * x ; x - y ?"


def test_execution_by_hand():
    steps, answer = lab.execute(lab.parse_problem(PROGRAM))
    assert [s.result for s in steps] == [7, 5, 2] and answer == "2 5"             # 3+4, 5*7=35, 7-5
    wrong, answer = lab.execute(lab.parse_problem(PROGRAM), {0: 6})
    assert [s.result for s in wrong] == [6, 0, 6] and answer == "6 0"             # the error carries through


def test_text_round_trip():
    problem = lab.random_problem(random.Random(0), 6)
    assert lab.parse_problem(problem.text()) == problem
    for bad in ("", "x 3 y 5", "hello", "x 3 y 5 ; x + ?", "x a y 5 ; x + 4 ?"):
        with pytest.raises((ValueError, TypeError)):
            lab.parse_problem(bad)


def test_slicing():
    # x * 0 makes the first step irrelevant; y's step matters to y
    problem = lab.parse_problem("x 3 y 5 ; x + 4 ; y + 1 ; x * 0 ?")
    assert lab.steps_that_matter(problem) == [False, True, True]
    # x * 5 keeps the parity of x only, which is enough to matter
    assert lab.steps_that_matter(lab.parse_problem("x 3 y 5 ; x + 4 ; x * 5 ?")) == [True, True]


def test_roles_of_a_written_trace():
    problem = lab.parse_problem("x 3 y 5 ; x + 4 ; y + 1 ; x * 0 ?")
    words = "so x : 3 + 4 = 7 ; hmm y : 5 + 1 = 6 ; us x : 7 * 0 = 0 ; #### 0 6 <eos>".split()
    roles = lab.label_tokens(problem, words)
    assert [r.kind for r in roles[:9]] == ["filler", "form", "form", "operand", "form", "operand", "form", "result", "form"]
    assert [r.step for r in roles] == [0] * 9 + [1] * 9 + [2] * 9 + [-1] * 4
    assert [w for w, r in zip(words, roles) if r.matters] == ["5", "1", "6", "7", "0", "0"]
    assert [r.kind for r in roles[-4:]] == ["answer"] * 4


@pytest.mark.parametrize("words", ["", "####", "= = = ; ; ; ; ; ;", "7 = 7 = 7", "x : 3 + 4 = so ; <pad> so"])
def test_malformed_completions_still_get_roles(words):
    assert len(lab.label_tokens(lab.parse_problem(PROGRAM), words.split())) == len(words.split())


def test_sloppiness_is_the_rate_of_wrong_steps():
    rng, wrong = random.Random(0), 0
    for _ in range(1000):
        problem = lab.random_problem(rng, 2)
        words = lab.write_trace(problem, rng, fillers=3, sloppiness=0.2).split()
        assert len(words) == 2 * 11 + 4
        for at in (3, 14):
            left, op, right, result = words[at + 2], words[at + 3], words[at + 4], words[at + 6]
            wrong += int(result) != lab.apply(op, int(left), int(right))
    assert wrong / 2000 == pytest.approx(0.2, abs=0.03)


def test_splits_are_disjoint_by_construction():
    problems = {split: {e.problem for e in data.lab_examples(split, 400, 2, seed=7)} for split in ("train", "validation", "test")}
    for split, texts in problems.items():
        assert {lab.split_of(lab.parse_problem(t)) for t in texts} == {split}
    shares = [lab.split_of(lab.random_problem(random.Random(i), 4, split=s)) for i, s in enumerate(["train", "test"])]
    assert shares == ["train", "test"] and not problems["train"] & problems["test"]


def test_tokenizer_is_word_level():
    tokenizer = lab.build_tokenizer()
    words = [w for w in lab.VOCABULARY]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(" ".join(words))) == words
    assert tokenizer.pad_token_id == 0 and tokenizer.eos_token_id == EOS_ID and lab.is_lab(tokenizer)


def test_warm_start_policy_is_in_its_band():
    """Greedy >= 0.90 and sampled 0.35-0.55 on 4 instructions, at most 1 M parameters and 2 MB on disk."""
    policy = models.load("lab", torch.device("cpu"))
    assert policy.is_lab and sum(p.numel() for p in policy.model.parameters()) <= 1_000_000
    assert sum(f.stat().st_size for f in lab.POLICY_DIR.iterdir()) <= 2_000_000
    examples = data.lab_examples("validation", 300, 4, 0)
    prompts = [data.encode_prompt(policy, e.problem) for e in examples]
    accuracy = {}
    for temperature in (0.0, 1.0):
        batch = sample(policy, prompts, 1, 80, draw_uniforms(300, 80, random_stream(0)), temperature)
        accuracy[temperature] = sum(is_correct(t, e.answer) for t, e in zip(batch.texts, examples)) / 300
    assert accuracy[0.0] >= 0.90 and 0.35 <= accuracy[1.0] <= 0.55
