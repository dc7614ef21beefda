"""Evaluation: figures and intervals by hand, a record that survives kills, refused inputs, the command from end to end."""
import json
import math
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, tiny_model

import evaluate
from oar import data, evaluation, lab, models
from oar.checkpoint import read_records, save_checkpoint
from oar.errors import UserError, exit_cleanly

Z2 = 1.959963984540054 ** 2


def run(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--quiet", "--device", "cpu", *map(str, argv)])
    evaluate.main()


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def results(out):
    return json.loads((out / "results.json").read_text())


# --------------------------------------------------------------------------------------------------------------------
# figures and intervals

def test_wilson_against_closed_forms():
    assert evaluation.wilson(0, 10) == pytest.approx((0, Z2 / (10 + Z2)))                    # [0, 0.278]
    assert evaluation.wilson(1, 10) == pytest.approx((10 / (10 + Z2), 1))
    half = math.sqrt(Z2) * math.sqrt(0.025 + Z2 / 400) / (1 + Z2 / 10)
    assert evaluation.wilson(0.5, 10) == pytest.approx((0.5 - half, 0.5 + half))             # [0.237, 0.763]


@pytest.mark.parametrize("rates, samples, trials", [
    ([1.0, 0.0, 1.0, 1.0], 1, 4),             # one completion each: plain Wilson
    ([0.0] * 7, 8, 7), ([1.0] * 7, 8, 7),     # no spread to learn from: the problems count
    ([0.5] * 4, 8, 32),                       # no spread at all between problems: at most the completions count
    ([0.25, 0.75] * 4, 8, 28),                # s^2 = 1/14, 1/4 / (1/14 / 8) = 28
    ([0.0, 1.0] * 2, 8, 4),                   # 1/4 / (1/3 / 4) = 3 trials, fewer than problems: the problems count
    ([0.375], 8, 1),
])
def test_rate_interval_is_wilson_with_effective_trials(rates, samples, trials):
    interval = evaluation.rate_interval(rates, samples)
    assert interval == pytest.approx(evaluation.wilson(sum(rates) / len(rates), trials))
    assert interval[1] - interval[0] > 0.05


def test_rate_interval_covers_the_truth():
    rng = np.random.default_rng(0)
    rates = rng.binomial(8, rng.beta(1, 3, (400, 30))) / 8                                   # true P@1 0.25
    covered = [low <= 0.25 <= high for low, high in (evaluation.rate_interval(list(row), 8) for row in rates)]
    assert 0.92 < np.mean(covered) < 0.98


def test_mean_interval_adds_distances_in_squares():
    assert evaluation.mean_interval([0.3], [(0.1, 0.6)]) == pytest.approx((0.1, 0.6))
    low, high = evaluation.mean_interval([0.5, 0.3], [(0.2, 0.6), (-0.1, 0.7)])
    assert (low, high) == pytest.approx((0.4 - math.hypot(0.3, 0.4) / 2, 0.4 + math.hypot(0.1, 0.4) / 2))
    low, high = evaluation.mean_interval([0.0, 0.0], [evaluation.wilson(0, 5)] * 2)
    assert low == 0 and high > 0.1


def test_paired_difference_matches_the_normal_interval():
    differences = [1.0] * 30 + [-1.0] * 10 + [0.0] * 160                                    # mean 0.1
    difference, (low, high) = evaluation.paired_difference([differences], seed=0)
    reach = math.sqrt(Z2) * np.std(differences) / math.sqrt(200)
    assert difference == pytest.approx(0.1) and (low, high) == pytest.approx((0.1 - reach, 0.1 + reach), abs=0.01)
    assert evaluation.paired_difference([differences], seed=0) == (difference, (low, high))
    stratified, interval = evaluation.paired_difference([[0.5] * 3, [0.1] * 300], seed=0)    # benchmarks count the same
    assert stratified == pytest.approx(0.3) and interval == pytest.approx((0.3, 0.3))


def records_of(right: dict[str, list[bool]], **more):
    return [{"id": name, "sample": n, "correct": correct, "tokens": 10 + n, "finished": n != 1, "answer": "1" if correct else None, **more}
            for name, verdicts in right.items() for n, correct in enumerate(verdicts)]


def test_benchmark_row_by_hand():
    records = records_of({"a": [False] * 4, "b": [True, False, False, False], "c": [True, True, False, False], "d": [True] * 4})
    row = evaluation.benchmark_row(records, samples=4, ks=[1, 2, 4])
    assert row["problems"] == 4 and row["p1"] == pytest.approx(7 / 16)
    assert row["pass_at"]["1"] == pytest.approx(7 / 16) and row["pass_at"]["4"] == pytest.approx(3 / 4)
    assert row["pass_at"]["2"] == pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4)                 # 1 - C(4 - c, 2) / C(4, 2)
    assert row["length"] == 11.5 and row["truncated"] == 0.25 and row["no_answer"] == pytest.approx(9 / 16)


def test_overall_is_the_mean_of_the_benchmarks():
    small = {"model": "m", "skipped": 1, **evaluation.benchmark_row(records_of({"a": [True]}), 1, [1])}
    large = {"model": "m", "skipped": 2, **evaluation.benchmark_row(records_of({str(i): [False] for i in range(9)}), 1, [1])}
    row = evaluation.overall_row([small, large])
    assert row["p1"] == 0.5 and row["pass_at"] == {"1": 0.5} and row["problems"] == 10 and row["skipped"] == 3
    assert row["p1_interval"] == evaluation.mean_interval([1, 0], [evaluation.wilson(1, 1), evaluation.wilson(0, 9)])


def test_comparison_is_over_common_problems():
    first = {"a": {"1": 0.0, "2": 0.5, "3": 1.0}, "b": {"1": 1.0}}
    other = {"a": {"1": 1.0, "2": 0.5}, "b": {"1": 0.0}}
    a, b, overall = evaluation.compare(first, other, seed=0)
    assert (a["problems"], a["first_p1"], a["p1"], a["difference"], a["better"], a["worse"]) == (2, 0.25, 0.75, 0.5, 1, 0)
    assert (b["difference"], b["better"], b["worse"]) == (-1.0, 0, 1)
    assert (overall["benchmark"], overall["problems"], overall["difference"]) == ("overall", 3, -0.25)
    assert evaluation.compare({"a": {"1": 1.0}}, {"a": {"2": 1.0}}, seed=0) == []


def test_tables_line_up_and_hold_no_control_characters():
    text = evaluation.table(["benchmark", "n"], [["\x1b[31mred\n|", "1"], ["b", "100"]])
    lines = text.split("\n")
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1 and "\x1b" not in text
    assert lines[2].startswith("| \\x1b[31mred\\n\\| |") and lines[3].endswith("| 100 |")


# --------------------------------------------------------------------------------------------------------------------
# the record

SAMPLED = ("--samples", 4, "--k", 1, 2, 4, "--limit", 12)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished evaluation of the lab's policy: its folder."""
    out = tmp_path_factory.mktemp("finished") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        run(monkeypatch, *SAMPLED, "--out", out)
    return out


def test_record_and_table_agree(finished):
    records = read_records(finished / "completions.jsonl")
    golds = {e.id: e.answer for e in data.lab_examples("test", 12, lab.INSTRUCTIONS, 0)}
    assert sorted((r["id"], r["sample"]) for r in records) == sorted((i, n) for i in golds for n in range(4))
    assert all(r["gold"] == golds[r["id"]] and r["correct"] == (r["answer"] == r["gold"]) for r in records)
    assert len({r["text"] for r in records}) == 48
    row, overall = results(finished)["results"]
    assert row["p1"] == pytest.approx(np.mean([r["correct"] for r in records])) and 0.2 < row["p1"] < 0.8
    assert overall["benchmark"] == "overall" and overall["p1_interval"] == pytest.approx(row["p1_interval"])
    assert all(overall[name] == row[name] for name in ("p1", "pass_at", "problems", "length", "truncated", "no_answer"))
    assert row["pass_at"]["1"] == pytest.approx(row["p1"]) and row["p1"] < row["pass_at"]["2"] < row["pass_at"]["4"]
    page = (finished / "results.md").read_text()
    assert re.search(r"\| benchmark \| problems \| P@1 % \| 95 % interval \| pass@2 % \| pass@4 % \|", page)
    assert f"{100 * row['p1']:.1f}" in page and "- seed: 0" in page


@pytest.mark.parametrize("cut", [0, 1, 700, -1])
def test_a_killed_run_ends_with_the_same_files(finished, tmp_path, monkeypatch, cut):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    whole = (finished / "completions.jsonl").read_bytes()
    (out / "completions.jsonl").write_bytes(whole[:cut])                 # mid-line, as a kill leaves it
    for name in ("results.json", "results.md"):
        (out / name).unlink()
    run(monkeypatch, *SAMPLED, "--out", out, "--batch-size", 7)          # other batches, same completions
    for name in ("completions.jsonl", "results.json", "results.md", "config.json"):
        assert (out / name).read_bytes() == (finished / name).read_bytes(), name


def test_a_finished_run_is_not_sampled_again(finished, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    monkeypatch.setattr(evaluate, "sample", None)
    run(monkeypatch, *SAMPLED[:2], "--k", 3, "--limit", 12, "--out", out)          # k is a matter of the table only
    assert list(results(out)["results"][0]["pass_at"]) == ["3"]


def test_completions_do_not_depend_on_limit_or_samples(finished, tmp_path, monkeypatch):
    run(monkeypatch, "--samples", 2, "--limit", 5, "--batch-size", 3, "--out", tmp_path)
    texts = {(r["id"], r["sample"]): r["text"] for r in read_records(finished / "completions.jsonl")}
    records = read_records(tmp_path / "completions.jsonl")
    assert len(records) == 10 and all(r["text"] == texts[r["id"], r["sample"]] for r in records)


def test_out_of_memory_halves_the_batch(finished, tmp_path, monkeypatch):
    sizes, real = [], evaluate.sample

    def small_device(policy, prompts, *args, **kwargs):
        sizes.append(len(prompts))
        if len(prompts) > 20:
            raise RuntimeError("CUDA out of memory")
        return real(policy, prompts, *args, **kwargs)

    monkeypatch.setattr(evaluate, "sample", small_device)
    run(monkeypatch, *SAMPLED, "--out", tmp_path)
    assert sizes == [48, 24, 12, 12, 12, 12]
    assert (tmp_path / "completions.jsonl").read_bytes() == (finished / "completions.jsonl").read_bytes()


@pytest.mark.parametrize("argv, message", [
    (("--seed", 1), "seed is 0 in this folder, not 1"),
    (("--temperature", 0.5), "temperature is 1.0 in this folder, not 0.5"),
    (("--limit", 13), "limit is 12 in this folder, not 13"),
    (("--instructions", 5), "instructions is 4 in this folder, not 5"),
])
def test_a_folder_with_other_settings_is_refused(finished, monkeypatch, argv, message):
    before = (finished / "completions.jsonl").read_bytes()
    with pytest.raises(UserError) as error:
        run(monkeypatch, *SAMPLED, "--out", finished, *argv)
    assert message in str(error.value) and str(finished) in str(error.value)
    assert (finished / "completions.jsonl").read_bytes() == before


def test_other_weights_or_problems_under_the_same_name_are_refused(tmp_path, monkeypatch):
    model, problems, out = tmp_path / "model", tmp_path / "p.jsonl", tmp_path / "out"
    shutil.copytree(lab.POLICY_DIR, model)
    rows = [{"problem": e.problem, "answer": e.answer, "id": e.id} for e in data.lab_examples("test", 3, 2, 0)]
    argv = ("--model", model, "--data", write_jsonl(problems, rows), "--temperature", 0, "--out", out)
    run(monkeypatch, *argv)
    write_jsonl(problems, [{**rows[0], "answer": "0 0"}, *rows[1:]])
    with pytest.raises(UserError, match="problems is .* in this folder"):
        run(monkeypatch, *argv)
    write_jsonl(problems, rows)
    run(monkeypatch, *argv)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    with pytest.raises(UserError, match="weights is .* in this folder"):
        run(monkeypatch, *argv)


def test_a_damaged_record_is_refused(finished, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    (out / "completions.jsonl").write_text("{\n")
    with pytest.raises(UserError, match="completions.jsonl: holds a line that is not a completion"):
        run(monkeypatch, *SAMPLED, "--out", out)
    (out / "config.json").unlink()
    with pytest.raises(UserError, match="no config.json"):
        run(monkeypatch, *SAMPLED, "--out", out)


# --------------------------------------------------------------------------------------------------------------------
# models and benchmarks

def test_two_models_on_two_benchmarks(tmp_path, monkeypatch, capsys):
    """A run folder resolves to its checkpoint; the comparison is what the record says, problem by problem."""
    policy = models.load("lab", torch.device("cpu"))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    save_checkpoint(tmp_path / "run", 3, policy.model, policy.tokenizer, torch.optim.SGD(policy.model.parameters()))
    files = []
    for name, instructions in (("two", 2), ("four", 4)):
        examples = data.lab_examples("test", 6, instructions, 0)
        files.append(write_jsonl(tmp_path / f"{name}.jsonl", [{"problem": e.problem, "answer": e.answer} for e in examples]))
    out = tmp_path / "out"
    run(monkeypatch, "--model", "lab", tmp_path / "run", "--data", *files, "--samples", 2, "--out", out)
    records = read_records(out / "completions.jsonl")
    found = results(out)
    assert [(r["model"], r["benchmark"]) for r in found["results"]] == [
        (m, b) for m in ("lab", str(tmp_path / "run")) for b in ("two", "four", "overall")]

    def rate(model, benchmark):
        return np.mean([r["correct"] for r in records if (r["model"], r["benchmark"]) == (model, benchmark)])

    for row in found["comparison"][:2]:
        assert row["difference"] == pytest.approx(rate(str(tmp_path / "run"), row["benchmark"]) - rate("lab", row["benchmark"]))
        assert row["interval"][0] <= row["difference"] <= row["interval"][1]
    assert found["comparison"][2]["difference"] == pytest.approx(np.mean([r["difference"] for r in found["comparison"][:2]]))
    assert found["results"][2]["p1"] == pytest.approx((rate("lab", "two") + rate("lab", "four")) / 2)
    assert "first P@1 %" in capsys.readouterr().out


def test_prompts_too_long_for_the_context_are_counted_and_left_out(tmp_path, monkeypatch, capsys):
    rows = [{"problem": e.problem, "answer": e.answer} for e in [*data.lab_examples("test", 2, 4, 0), *data.lab_examples("test", 1, 110, 0)]]
    out = tmp_path / "out"                                               # 5 + 4 * 110 tokens leave less than 80 of 512
    run(monkeypatch, "--data", write_jsonl(tmp_path / "p.jsonl", rows), "--temperature", 0, "--out", out)
    row = results(out)["results"][0]
    assert (row["problems"], row["skipped"]) == (2, 1) and len(read_records(out / "completions.jsonl")) == 2
    assert "left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="--max-new-tokens 510: no prompt of p leaves room"):
        run(monkeypatch, "--data", tmp_path / "p.jsonl", "--max-new-tokens", 510, "--out", tmp_path / "none")


def test_every_benchmark_name_reaches_its_hub_data_set(monkeypatch):
    datasets = pytest.importorskip("datasets")
    for name, (hub_id, hub_config, split, problem_field, answer_field) in data.BENCHMARKS.items():
        gold = ["3", "three"] if name == "olympiad" else "2 + 1 = 3\n#### 3" if name == "gsm8k" else "3"

        def fake(*args, **kwargs):
            assert (args, kwargs) == ((hub_id, hub_config), {"split": split})
            return datasets.Dataset.from_list([{problem_field: f"p{i}", answer_field: gold} for i in range(3)])

        monkeypatch.setattr(datasets, "load_dataset", fake)
        for source in (name, hub_id):
            found, examples = data.read_benchmark(source, None, "answer", "train", None, 4, 2)
            assert found == name and [e.problem for e in examples] == ["p0", "p1"]
            assert examples[0].answer == (gold if name == "olympiad" else "3")


def test_a_base_model_on_the_shared_benchmarks(shared, tmp_path, monkeypatch):
    """Another vocabulary, a plain prompt and lists of golds: a tiny random model with a word-level tokenizer."""
    from tokenizers import Tokenizer, models as token_models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    core = Tokenizer(token_models.WordLevel({"<eos>": 0, "?": 1, "4": 2, "\\boxed{4}": 3, "so": 4}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)
    model = tiny_model("gpt2")
    model.config.eos_token_id = model.generation_config.eos_token_id = 0
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    files = [shared / "data" / f"{name}.jsonl" for name in ("minerva", "aime24", "gsm8k_test")]
    run(monkeypatch, "--model", tmp_path / "model", "--data", *files, "--limit", 4, "--samples", 2, "--max-new-tokens", 8, "--out", tmp_path)
    records = read_records(tmp_path / "completions.jsonl")
    assert {r["benchmark"] for r in records} == {"minerva", "aime24", "gsm8k_test"}
    assert all(("golds" in r) == (r["benchmark"] == "minerva") for r in records)
    assert [row["problems"] for row in results(tmp_path)["results"]] == [4, 4, 4, 12]


@pytest.mark.parametrize("argv, message", [
    ("--samples 4 --k 1 8", "--k 8 needs at least 8 samples per problem, and --samples is 4"),
    ("--k 9", "--k 9 needs at least 9 samples per problem, and --samples is 8"),
    ("--temperature 0 --samples 4 --k 4", "--k 4 needs different completions"),
    ("--samples 0", "--samples must be positive, got 0"),
    ("--k 0", "--k must be positive, got [0]"),
    ("--limit 0", "--limit must be positive, got 0"),
    ("--temperature nan", "--temperature must be at least 0, got nan"),
    ("--temperature -1", "--temperature must be at least 0, got -1.0"),
    ("--top-p 0", "--top-p must be above 0 and at most 1, got 0.0"),
    ("--seed -1", "--seed must be at least 0, got -1"),
    ("--model lab lab", "--model must be given once each, got ['lab', 'lab']"),
    ("--model lab ./nowhere", "--model ./nowhere: no such folder"),
    ("--data lab lab", "--data lab: the name 'lab' is taken"),
    ("--data gms8k", "--data gms8k: no such file, and not one of lab, gsm8k,"),
    ("--data nowhere.jsonl", "nowhere.jsonl: No such file"),
    ("--grade nowhere.jsonl", "nowhere.jsonl: No such file"),
])
def test_refused_flags(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        exit_cleanly(lambda: run(monkeypatch, *argv.split()))
    printed = capsys.readouterr()
    assert exit.value.code == 2 and printed.err.startswith(f"error: {message}") and printed.err.count("\n") == 1
    assert printed.out == "" and list(tmp_path.iterdir()) == []


def test_the_lab_policy_and_other_problems_do_not_mix(tmp_path, monkeypatch):
    problems = write_jsonl(tmp_path / "p.jsonl", [{"problem": "What is 1 + 1?", "answer": "2"}])
    with pytest.raises(UserError, match="--model lab with p: the lab's policies and the lab's problems go together only"):
        run(monkeypatch, "--data", problems, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------------------------
# grading existing outputs

def test_grade_by_hand(tmp_path, monkeypatch, capsys):
    lines = [("a", "7", "thus \\boxed{7}", 1), ("a", "7", "thus \\boxed{8}", 0), ("a", "7", "thus \\boxed{7.0}", False),
             ("a", "7", "no idea", True), ("b", ["1", "0.5"], "#### 1/2", None)]
    rows = [{"benchmark": b, "golds" if isinstance(g, list) else "gold": g, "text": t, **({} if label is None else {"label": label})}
            for b, g, t, label in lines]
    run(monkeypatch, "--grade", write_jsonl(tmp_path / "f.jsonl", rows), "--out", tmp_path / "out")
    verdicts = read_records(tmp_path / "out" / "verdicts.jsonl")
    assert [v["correct"] for v in verdicts] == [True, False, True, False, True] and [v["line"] for v in verdicts] == [1, 2, 3, 4, 5]
    assert [v["answer"] for v in verdicts] == ["7", "8", "7.0", None, "1/2"]
    a, b, every = results(tmp_path / "out")["results"]
    assert [a[name] for name in ("both_right", "only_verdict", "only_label", "both_wrong")] == [1, 1, 1, 1]
    assert (a["accuracy"], a["agreement"], a["no_answer"], a["labelled"]) == (0.5, 0.5, 0.25, 4)
    assert (b["accuracy"], b["labelled"], b["agreement"]) == (1, 0, None) and b["interval"] == list(evaluation.wilson(1, 1))
    assert (every["benchmark"], every["lines"], every["accuracy"]) == ("all lines", 5, 0.6)
    assert "only label" in capsys.readouterr().out


def test_a_completion_record_can_be_graded_again(finished, tmp_path, monkeypatch):
    run(monkeypatch, "--grade", finished / "completions.jsonl", "--out", tmp_path / "out")
    old, new = read_records(finished / "completions.jsonl"), read_records(tmp_path / "out" / "verdicts.jsonl")
    assert [r["correct"] for r in old] == [r["correct"] for r in new]
    with pytest.raises(UserError, match="holds a run"):
        run(monkeypatch, "--grade", finished / "completions.jsonl", "--out", finished)


@pytest.mark.parametrize("line, message", [
    ('{"gold": "1"}', "line 2: no field 'text'"),
    ('{"gold": "1", "text": null}', "line 2: field 'text' must be text"),
    ('{"text": "1"}', "line 2: no field 'gold' (there are: 'text')"),
    ('{"golds": [], "text": "1"}', "line 2: field 'golds' must be a non-empty list"),
    ('{"golds": ["1", {}], "text": "1"}', "line 2: field 'golds' must be text"),
    ('{"gold": "1", "text": "1", "label": 2}', "line 2: field 'label' must be 0, 1, false or true, not 2"),
    ('{"gold": "1", "text": "1", "label": [1]}', "line 2: field 'label' must be"),
    ('{"gold": "1", "text": "1", "benchmark": {}}', "line 2: field 'benchmark' must be text"),
    ('{"gold": ' + "9" * 5000 + ', "text": "1"}', "line 2: not valid JSON"),
    ('[1, 2]', "line 2: expected an object"),
    ('{"gold": "1", "te', "line 2: not valid JSON"),
])
def test_bad_lines_are_named(tmp_path, monkeypatch, line, message):
    file = tmp_path / "f.jsonl"
    file.write_text('{"gold": "1", "text": "1"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UserError) as error:
        run(monkeypatch, "--grade", file, "--out", tmp_path / "out")
    assert message in str(error.value) and "f.jsonl" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_hostile_file_ends_in_time_with_a_verdict_per_line(tmp_path, monkeypatch, capsys):
    texts = ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{" * 20000, "{" * 300_000 + "}" * 300_000, "\\boxed{\ud800}", "\x00\x1b[31m\\boxed{\x1b]0;x\x07}",
             "", "\\boxed{" + "9" * 100_000 + "}", "\\boxed{\u2028 5 \u2029}", "\\boxed{__import__('os').system('touch " + str(tmp_path / "boom") + "')}"]
    rows = [{"gold": "2", "text": text, "benchmark": "\x1b[31mred"} for text in texts]
    started = time.monotonic()
    run(monkeypatch, "--grade", write_jsonl(tmp_path / "f.jsonl", rows), "--out", tmp_path / "out")
    assert time.monotonic() - started < 30
    assert [v["correct"] for v in read_records(tmp_path / "out" / "verdicts.jsonl")] == [False] * len(texts)
    assert "\x1b" not in capsys.readouterr().out and "\x1b" not in (tmp_path / "out" / "results.md").read_text()
    assert not (tmp_path / "boom").exists()


# --------------------------------------------------------------------------------------------------------------------
# the command

def test_the_command_from_end_to_end(tmp_path):
    command = [sys.executable, str(ROOT / "evaluate.py"), "--limit", "4", "--samples", "2", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    folder, = (tmp_path / "runs").iterdir()
    assert "4 lab problems x 2 completions" in done.stdout and str(folder.relative_to(tmp_path)) in done.stdout
    assert "8/8" in done.stderr and len(read_records(folder / "completions.jsonl")) == 8


def test_every_flag_is_read():
    source = (ROOT / "evaluate.py").read_text(encoding="utf-8")
    unread = [name for name in evaluate.Config.__dataclass_fields__ if f"config.{name}" not in source]
    assert unread == []
