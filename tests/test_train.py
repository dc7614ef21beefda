"""train.py end to end on the lab: the run folder, resuming, refusing, and every method."""
import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import train
from oar import checkpoint, models
from oar.credit import METHODS
from oar.errors import UserError

SMALL = ["--steps", "4", "--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "72", "--validation-size", "8",
         "--eval-every", "2", "--save-every", "2", "--quiet"]
TIMES = ("seconds_", "share_", "memory_")


def run(tmp_path, *argv, name="run"):
    """Run train.main() in this process; returns the run folder."""
    folder = tmp_path / name
    sys.argv = ["train.py", *SMALL, "--out", str(folder), *argv]
    train.main()
    return folder


def records(folder):
    return [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in checkpoint.read_records(folder / "metrics.jsonl")]


def weights(folder):
    return models.load(str(folder), torch.device("cpu")).model.state_dict()


def test_run_folder_is_complete(tmp_path, capsys):
    folder = run(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["method"] == "oar_g" and config["lr"] == 1e-4 and None not in (config["steps"], config["data"])
    metrics = checkpoint.read_records(folder / "metrics.jsonl")
    assert [r["step"] for r in metrics] == [0, 1, 2, 3, 4]
    for name in ("reward", "informative_share", "entropy", "entropy_filler", "entropy_pivotal", "length", "truncated_share", "clip_fraction",
                 "approx_kl", "grad_norm", "ess_ratio", "top10_mass", "seconds_rollout", "seconds_attribution", "seconds_update",
                 "share_rollout", "share_attribution", "share_update", "memory_mb"):
        assert all(name in r for r in metrics[1:]), name
    assert [r["step"] for r in metrics if "validation_sampled" in r] == [0, 2, 4]
    assert metrics[1]["share_rollout"] + metrics[1]["share_attribution"] + metrics[1]["share_update"] == pytest.approx(1)
    assert metrics[1]["entropy_filler"] > 2 > metrics[1]["entropy_pivotal"] and metrics[1]["approx_kl"] == 0
    samples = checkpoint.read_records(folder / "samples.jsonl")
    assert {s["step"] for s in samples} == {1, 4}
    for sample in samples:
        assert len(sample["tokens"]) == len(sample["weights"]) == len(sample["importance"])
        assert sample["reward"] in (0.0, 1.0) and " ".join(sample["tokens"]).startswith(sample["text"][:20])
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert {p.name for p in folder.iterdir()} == {"config.json", "metrics.jsonl", "samples.jsonl", "curves.png", "checkpoints"}
    policy = models.load(str(folder), torch.device("cpu"))
    assert policy.is_lab and policy.model.dtype == torch.float32
    start = models.load("lab", torch.device("cpu")).model.state_dict()
    moved = [not torch.equal(value, start[key]) for key, value in policy.model.state_dict().items()]
    assert all(moved)                                                                # every parameter has learnt


def test_resumed_run_equals_uninterrupted_run(tmp_path):
    whole = run(tmp_path, "--method", "oar_f", name="whole")
    cut = run(tmp_path, "--method", "oar_f", name="cut")
    # go back to a kill after step 3: the last checkpoint is of step 2, and step 3 is already in the records
    import shutil
    shutil.rmtree(cut / "checkpoints" / "step_000004")
    lines = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:20])           # the last line cut short
    sys.argv = ["train.py", "--resume", str(cut), "--quiet"]
    train.main()
    assert records(cut) == records(whole)
    assert checkpoint.read_records(cut / "samples.jsonl") == checkpoint.read_records(whole / "samples.jsonl")
    first, second = weights(whole), weights(cut)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_resume_refuses_a_changed_config(tmp_path):
    folder = run(tmp_path, "--steps", "1")
    sys.argv = ["train.py", "--resume", str(folder), "--lr", "1e-3"]
    with pytest.raises(UserError, match="--lr is 0.0001 in this run, not 0.001"):
        train.main()
    sys.argv = ["train.py", "--out", str(folder)]
    with pytest.raises(UserError, match="holds a run already"):
        train.main()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(tmp_path, method):
    last = records(run(tmp_path, "--method", method, "--steps", "1", "--validation-size", "0", "--eval-every", "0"))[-1]
    assert last["grad_norm"] > 0
    if method in ("grpo", "entropy_bonus", "ktae"):
        assert last["ess_ratio"] == pytest.approx(1)
    else:
        assert last["ess_ratio"] < 0.999


@pytest.mark.parametrize("extra", [
    ["--inner-epochs", "3", "--clip-high", "0.28"], ["--kl-beta", "0.05"], ["--loss-norm", "token"], ["--loss-norm", "constant"],
    ["--dtype", "bfloat16", "--method", "oar_p"], ["--gradient-checkpointing", "--method", "oar_f"], ["--perturb", "resample", "--method", "oar_p"],
    ["--gate", "boost_only", "--no-renormalise"], ["--temperature", "0.7", "--probe", "answer_joint", "--method", "oar_p"], ["--instructions", "2"]])
def test_options_run(tmp_path, extra):
    last = records(run(tmp_path, "--steps", "2", "--validation-size", "0", "--eval-every", "0", *extra))[-1]
    assert last["step"] == 2 and 0 <= last["grad_norm"] < 100
    if "--instructions" not in extra:                # two instructions are easy: their groups may be all right
        assert last["grad_norm"] > 0
    if "--inner-epochs" in extra:
        assert last["approx_kl"] > 0
    if "--kl-beta" in extra:
        assert last["kl_ref"] >= 0


def test_memory_budget_changes_nothing(tmp_path):
    one = records(run(tmp_path, "--steps", "2", name="one"))
    two = records(run(tmp_path, "--steps", "2", "--tokens-per-pass", "150", name="two"))
    for a, b in zip(one, two):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == (b[name] if b[name] is None else pytest.approx(b[name], rel=2e-2, abs=1e-4)), name


def test_gradient_checkpointing_changes_nothing(tmp_path):
    one, two = (records(run(tmp_path, "--method", "grpo", "--steps", "2", *extra, name=name))
                for name, extra in (("plain", []), ("saving", ["--gradient-checkpointing"])))
    assert [r["grad_norm"] for r in one[1:]] == pytest.approx([r["grad_norm"] for r in two[1:]], rel=1e-3)


def test_a_step_with_nothing_to_learn_runs(tmp_path):
    # one token is never enough for an answer: every reward is 0, every group uninformative
    folder = run(tmp_path, "--max-new-tokens", "1", "--steps", "1", "--validation-size", "0", "--eval-every", "0")
    last = records(folder)[-1]
    assert last["reward"] == 0 and last["informative_share"] == 0 and last["truncated_share"] == 1 and last["grad_norm"] == 0
    start = models.load("lab", torch.device("cpu")).model.state_dict()
    assert all(torch.equal(value, start[name]) for name, value in weights(folder).items())


def test_real_model_path_on_a_local_folder(tmp_path):
    """A non-lab model with a JSONL file: plain template, hold-out, pad = eos."""
    from test_data import word_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM
    tokenizer = word_tokenizer(eos_token="?")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                 max_position_embeddings=64, eos_token_id=0, bos_token_id=None, pad_token_id=None)).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    rows = [{"problem": f"1+1? {'U ' * (60 if i == 3 else i)}", "answer": "2"} for i in range(8)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    argv = ["--model", str(tmp_path / "m"), "--data", str(tmp_path / "p.jsonl"), "--steps", "2", "--validation-size", "3", "--max-new-tokens", "8"]
    last = records(run(tmp_path, *argv))[-1]
    assert last["step"] == 2 and "entropy_filler" not in last and "validation_greedy" in last


def test_too_few_problems_is_an_error(tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"problem": f"{i}+1?", "answer": "2"}) + "\n" for i in range(5)))
    config = train.Config(data=str(tmp_path / "p.jsonl"), problem_field="problem", validation_size=3, prompts_per_step=4, max_new_tokens=8)
    policy = models.load("lab", torch.device("cpu"))._replace(is_lab=False)
    with pytest.raises(UserError, match="2 problems are left for training .*3 are held out.* fewer than --prompts-per-step 4"):
        train.load_examples(config, policy)


@pytest.mark.parametrize("argv, message", [
    (["--group-size", "1"], "--group-size must be at least 2"),
    (["--lr", "-1"], "--lr must be positive"),
    (["--threshold", "1.5"], "--threshold must be between 0 and 1"),
    (["--data", "gsm8k.jsonl"], "go together only"),
    (["--model", "./nowhere"], "--model ./nowhere: no such folder"),
    (["--resume", "nowhere"], "--resume nowhere: cannot read its config.json"),
    (["--method", "magic"], "invalid choice: 'magic'"),
    (["--lrr", "1"], "--lrr"),
])
def test_mistakes_are_one_sentence_and_exit_code_2(tmp_path, argv, message):
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "--out", str(tmp_path / "run"), *argv], capture_output=True, text=True,
                          cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_every_flag_is_read():
    source = "".join((ROOT / name).read_text() for name in ("train.py", "oar/config.py", "oar/credit.py"))
    for setting in dataclasses.fields(train.Config):
        reads = source.count(f"config.{setting.name}") + source.count(f'"{setting.name}"')
        assert reads > 0, f"Config.{setting.name} is read nowhere"


def test_each_epoch_visits_every_problem_once():
    seen = [p for step in (1, 2, 3, 4) for p in train.examples_of_step(list(range(6)), step, 3, seed=1)]
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6)) and seen[:6] != seen[6:]
