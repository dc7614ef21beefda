"""The recall benchmark's arithmetic: ties, ceilings, intervals, paired claims, and problems with right answers."""
import numpy as np
import pytest
import torch
from conftest import EOS_ID, make_batch, tiny_model

from benchmarks import edges, recall, recall_report, word_problems
from oar.models import Policy

TOP = recall.TOP


def causal(*marks):
    return torch.tensor(marks, dtype=torch.bool)


def test_recall_by_hand():
    scores, marks = torch.tensor([0.9, 0.1, 0.8, 0.3, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0]), causal(1, 1, 0, 0, 0, 0, 0, 0, 0, 0)
    assert recall.recall_at(scores, marks, 10) == 0.5                                # top 1 of 10: one of two
    assert recall.recall_at(scores, marks, 40) == 0.5                                # 0.9 0.8 0.3 0.2
    assert recall.recall_at(scores, marks, 50) == 1.0
    assert recall.recall_at(scores, marks, 1) == 0.5                                 # at least one token


def test_ties_count_by_their_expectation():
    marks = causal(1, 0, 0, 1)
    assert recall.recall_at(torch.zeros(4), marks, 50) == 0.5                        # constant scores are random scores
    assert recall.recall_at(torch.tensor([1.0, 0, 0, 0]), marks, 50) == pytest.approx((1 + 1 / 3) / 2)
    assert recall.recall_at(marks.float(), marks, 50) == 1.0 and recall.recall_at(marks.float(), marks, 25) == 0.5      # the ceiling


def test_interval_holds_the_mean_and_narrows():
    values = np.random.default_rng(1).random((400, 2))
    wide, narrow = recall_report.interval(values[:40]), recall_report.interval(values)
    for (mean, low, high), (mean2, low2, high2) in zip(wide, narrow):
        assert low < mean < high and low2 < mean2 < high2 and high2 - low2 < high - low
    assert recall_report.interval(np.ones((5, 1))) == [[1.0, 1.0, 1.0]]


def test_claims_are_paired(tmp_path, capsys):
    """oar_p always 0.1 above random: the paired interval is exact although both vary."""
    names = [f"{m} | {p}" for m in recall.PROBED for p in ("last", "answer_mean", "answer_joint")] + ["position", "entropy", "ktae", "ceiling"]
    records = []
    for base in np.linspace(0, 0.8, 20):
        row = {name: [base] * len(TOP) for name in names} | {"random": [base] * len(TOP), "oar_p | answer_mean": [base + 0.1] * len(TOP)}
        records.append({"tokens": 10, "causal": {"all": 2}, "recall": {"all": row}})
    summary = recall_report.summarise(records + [{"tokens": 10, "causal": {"all": 0}, "recall": {}}], TOP)
    assert summary["claims"]["all"]["OAR-P beats random"] == [0.1, 0.1, 0.1]
    assert summary["truths"]["all"] == {"completions": 20, "causal tokens": pytest.approx(1.9, abs=0.01)}
    summary["setting"] = {"model": "m"}
    recall_report.show(summary, TOP, print)
    out = capsys.readouterr().out
    assert "| OAR-P beats random | yes +0.10 [+0.10, +0.10] |" in out and "| random beats entropy | open +0.00" in out
    recall_report.picture(summary, TOP, tmp_path / "recall.png")
    assert (tmp_path / "recall.png").stat().st_size > 10000


def test_one_correct_completion_per_problem(tokenizer):
    policy = Policy(tiny_model("llama"), tokenizer, (EOS_ID,), True)
    texts = ["so so #### 1 2 <eos>", "so so #### 3 4 <eos>", "so x #### 3 4 <eos>", "so so #### 5 6 <eos>", "#### 7 8 <eos>", "so so #### 9 9 <eos>"]
    batch = make_batch([[12, 5]] * 6, [tokenizer.encode(t) for t in texts], tokenizer)
    rows, keys = recall.pick_correct(policy, batch, ["3 4"] * 3 + ["7 8"] * 3, 3)
    assert rows == [1] and keys.shape == batch.completion_ids.shape                  # "#### 7 8" has no reasoning to score


def test_word_problems_are_right():
    examples = word_problems.examples(60, 0)
    assert len({e.problem for e in examples}) == 60
    for e in examples:
        numbers = [int(word) for word in e.problem.split() if word.isdigit()]
        assert int(e.answer) == (numbers[0] - numbers[1] if "gives away" in e.problem else sum(numbers))
    assert word_problems.examples(5, 1) == word_problems.examples(5, 1) != word_problems.examples(5, 2)


def test_edge_strengths_by_hand():
    p, q = torch.tensor([0.8, 0.1, 0.1]).log(), torch.tensor([0.2, 0.7, 0.1]).log()
    variation, drop, kl = edges.divergences(p, q, torch.tensor(0)).tolist()
    assert variation == pytest.approx(0.6) and drop == pytest.approx(0.6)
    assert kl == pytest.approx(0.8 * np.log(4) + 0.1 * np.log(1 / 7), rel=1e-4)
    assert edges.divergences(p, q, torch.tensor(1))[1] == 0                          # it became likelier: no drop


def test_noisy_or_by_hand():
    links = torch.zeros(1, 3, 3)
    links[0, 0, 1], links[0, 0, 2] = 0.5, 0.5
    credit = edges.noisy_or(torch.tensor([[0.0, 0.4, 0.8]]), links)
    assert credit[0].tolist() == pytest.approx([1 - 0.8 * 0.6, 0.4, 0.8])
