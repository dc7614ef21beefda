"""Kills, signals, damaged checkpoints, full disks, second processes: real ones, and every point of a checkpoint write."""
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import ROOT, tiny_model

import train
from benchmarks import faults, soak
from oar import checkpoint, interrupt, lab, lock, models
from oar.errors import UserError

SMALL = ("--method grpo --steps 6 --prompts-per-step 2 --group-size 4 --max-new-tokens 72 --validation-size 4 --eval-every 3 --save-every 2 "
         "--device cpu --quiet").split()


def run(folder, *argv):
    sys.argv = ["train.py", *SMALL, "--out", str(folder), *argv]
    train.main()


# --------------------------------------------------------------------------------------------------------------------
# processes (python -m benchmarks.faults does the same, more often)

@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *SMALL, "--out", str(folder)])
        train.main()
    return folder


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(faults, "SETTING", SMALL)
    monkeypatch.setattr(faults, "STEPS", 6)


def test_killed_training_ends_like_an_undisturbed_one(reference, tmp_path, small):
    for name in ("random", "writes"):
        (tmp_path / name).mkdir()
    assert faults.kills(tmp_path / "random", reference, 2, 8, random.Random(1)) == [True, True]
    assert faults.kills(tmp_path / "writes", reference, 1, 0, random.Random(1)) == [True]


def test_a_signal_finishes_the_step_saves_and_says_how_to_resume(reference, tmp_path, small):
    assert faults.polite_signals(tmp_path, reference, [signal.SIGTERM], random.Random(2)) == [True]


def test_killed_evaluation_ends_like_an_undisturbed_one(tmp_path):
    command = ["--samples", "4", "--limit", "12", "--batch-size", "8", "--device", "cpu", "--quiet"]
    assert faults.kills_of_commands(tmp_path, command, "completions.jsonl", 1, random.Random(3)) == [True]


def test_killed_grading_ends_like_an_undisturbed_one(tmp_path, monkeypatch):
    """Stopped after some verdicts: those are not graded again, and the files are the same."""
    import evaluate
    graded, real = [], evaluate.is_correct

    def stop_at_300(text, gold):
        graded.append(text)
        if len(graded) == 300:
            raise KeyboardInterrupt
        return real(text, gold)

    rows = [{"gold": str(i), "text": f"#### {i + i % 2}", "label": i % 2} for i in range(1000)]
    file = tmp_path / "f.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for out, judge in (("whole", real), ("cut", stop_at_300), ("cut", stop_at_300)):
        monkeypatch.setattr(evaluate, "is_correct", judge)
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "--grade", str(file), "--quiet", "--out", str(tmp_path / out)])
        try:
            evaluate.main()
        except KeyboardInterrupt:
            part, = (tmp_path / "cut").glob("grading-*.jsonl")
            part.write_bytes(part.read_bytes()[:-7])                             # the last line cut short
    assert len(graded) == 300 + 1000 - 298
    for name in ("verdicts.jsonl", "results.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert {p.name for p in (tmp_path / "cut").iterdir()} == {"verdicts.jsonl", "results.json", "results.md"}


def test_both_commands_end_with_the_signals_exit_code():
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        script = "import os, sys; from oar import interrupt\nwith interrupt.at_once('taken up again'):\n    os.kill(os.getpid(), int(sys.argv[1])); input()"
        done = subprocess.run([sys.executable, "-c", script, str(int(number))], capture_output=True, text=True, cwd=ROOT, stdin=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (code, "\ntaken up again\n")


def test_a_second_signal_stops_at_once(capfd):
    with pytest.raises(KeyboardInterrupt), interrupt.deferred() as stopping:
        assert stopping() == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping() == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and "second one stops at once" in capfd.readouterr().err


# --------------------------------------------------------------------------------------------------------------------
# randomness

def test_global_random_states_are_neither_read_nor_moved(reference, tmp_path, monkeypatch):
    """So there is nothing to save of them: a run under scrambled generators is the same run."""
    import numpy as np
    real = train.train_step

    def scrambled(*args):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(args[5] * 77)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        result = real(*args)
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        assert before[:2] == after[:2] and torch.equal(before[2], after[2])
        return result

    monkeypatch.setattr(train, "train_step", scrambled)
    run(tmp_path / "run")
    assert faults.same(tmp_path / "run", reference)


def test_a_kill_before_the_first_checkpoint_repeats_nothing(reference, tmp_path):
    shutil.copytree(reference, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    sys.argv = ["train.py", "--resume", str(tmp_path / "run"), "--quiet"]
    train.main()
    assert faults.same(tmp_path / "run", reference)


# --------------------------------------------------------------------------------------------------------------------
# checkpoints

@pytest.fixture
def saved(tmp_path):
    """A run folder with two checkpoints, and what the third would hold."""
    model, tokenizer = tiny_model("llama"), lab.build_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2):
        checkpoint.save_checkpoint(tmp_path, step, model, tokenizer, optimizer)
    return tmp_path, model, tokenizer, optimizer


def test_checkpoints_hold_a_manifest_and_the_last_two_are_kept(saved):
    run_folder, *rest = saved
    last = checkpoint.save_checkpoint(run_folder, 3, *rest)
    assert [p.name for p in sorted((run_folder / "checkpoints").iterdir())] == ["step_000002", "step_000003"]
    manifest = json.loads((last / "manifest.json").read_text())
    assert set(manifest) == {p.name for p in last.iterdir()} - {"manifest.json"} and checkpoint.damage(last) is None
    assert models.load(str(run_folder), torch.device("cpu")).is_lab


@pytest.mark.parametrize("harm, said", [
    (lambda c: os.truncate(c / "model.safetensors", 100), "model.safetensors has 100 bytes instead of"),
    (lambda c: os.truncate(c / "trainer.pt", 0), "trainer.pt has 0 bytes instead of"),
    (lambda c: (c / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    (lambda c: (c / "manifest.json").unlink(), "manifest.json is missing"),
    (lambda c: (c / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    (lambda c: (c / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
    (lambda c: (c / "config.json").write_bytes((c / "config.json").read_bytes().replace(b"llama", b"lllma")), "config.json has changed"),
])
def test_a_damaged_checkpoint_is_passed_over(saved, harm, said, capsys):
    run_folder, *rest = saved
    harm(run_folder / "checkpoints" / "step_000002")
    assert checkpoint.latest_checkpoint(run_folder).name == "step_000001"
    assert said in capsys.readouterr().err
    checkpoint.latest_checkpoint(run_folder)
    assert capsys.readouterr().err == ""                                         # said once
    checkpoint.save_checkpoint(run_folder, 2, *rest)                             # written again, over the damaged one
    assert checkpoint.latest_checkpoint(run_folder).name == "step_000002"


def test_later_damaged_checkpoints_do_not_push_out_whole_ones(saved):
    run_folder, *rest = saved
    checkpoint.save_checkpoint(run_folder, 9, *rest)
    os.truncate(run_folder / "checkpoints" / "step_000009" / "trainer.pt", 1)
    checkpoint.save_checkpoint(run_folder, 3, *rest)
    assert [p.name for p in sorted((run_folder / "checkpoints").iterdir())] == ["step_000002", "step_000003"]


def test_only_damaged_checkpoints_are_refused(saved):
    run_folder = saved[0]
    for folder in (run_folder / "checkpoints").iterdir():
        os.truncate(folder / "trainer.pt", 1)
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        checkpoint.latest_checkpoint(run_folder)


class Kill(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("function", [(os, "fsync"), (os, "replace"), (shutil, "rmtree"), (torch, "save")])
def test_a_write_that_stops_anywhere_leaves_a_whole_checkpoint(saved, function, monkeypatch):
    run_folder, *rest = saved
    place, name = function
    real, stopped = getattr(place, name), 0
    for stop_at in range(1, 40):
        calls = [0]

        def counted(*args, **options):
            calls[0] += 1
            if calls[0] == stop_at:
                raise Kill
            return real(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(place, name, counted)
            try:
                checkpoint.save_checkpoint(run_folder, stop_at + 2, *rest)
            except Kill:
                stopped += 1
        last = checkpoint.latest_checkpoint(run_folder)
        assert checkpoint.damage(last) is None and models.load(str(last), torch.device("cpu")).is_lab
        if calls[0] < stop_at:
            assert last.name == f"step_{stop_at + 2:06d}"
            break
    assert stopped >= 1 and calls[0] < stop_at


# --------------------------------------------------------------------------------------------------------------------
# full disk

@pytest.mark.parametrize("function", [(os, "fsync"), (torch, "save"), (os, "replace")])
def test_no_room_is_one_sentence_and_the_last_checkpoint_stays(saved, function, monkeypatch):
    run_folder, *rest = saved

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*function, full)
        with pytest.raises(UserError, match="step_000003 cannot be written .No space left on device.|manifest.json cannot be"):
            checkpoint.save_checkpoint(run_folder, 3, *rest)
    assert checkpoint.latest_checkpoint(run_folder).name == "step_000002"
    assert not list((run_folder / "checkpoints").glob("writing_*"))                  # its room is free again


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_records_on_a_full_disk(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match="metrics.jsonl cannot be written .No space left on device."):
        checkpoint.append_jsonl(tmp_path / "metrics.jsonl", {"step": 1})


def test_a_small_disk(tmp_path, monkeypatch):
    """A real one, where the machine lets us mount it: room for one checkpoint of 7.4 MiB, not for two."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        with pytest.raises(UserError, match="step_000004 cannot be written .*No space left.*what was saved before is whole") as error:
            run(tmp_path / "run")
        assert "\n" not in str(error.value) and checkpoint.latest_checkpoint(tmp_path / "run").name == "step_000002"
        assert models.load(str(tmp_path / "run"), torch.device("cpu")).is_lab
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)      # the weights are still mapped


# --------------------------------------------------------------------------------------------------------------------
# one process per folder

def test_a_folder_in_use_is_refused_with_its_process(tmp_path):
    with lock.hold(tmp_path / "run"):
        (tmp_path / "run" / "config.json").write_text("{}")
        with pytest.raises(UserError, match=f"run: process {os.getpid()} is at work in this folder"), lock.hold(tmp_path / "run"):
            pass
        assert (tmp_path / "run" / "lock").exists()
    assert not (tmp_path / "run" / "lock").exists()


def test_a_stale_lock_is_taken_over(tmp_path):
    script = f"import os; from pathlib import Path; from oar import lock\nwith lock.hold(Path({str(tmp_path)!r})): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == -9
    assert (tmp_path / "lock").exists()
    with lock.hold(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_of_many_at_once_one_gets_the_lock(tmp_path):
    held, most, refused = [0], [0], [0]

    def work():
        for _ in range(30):
            try:
                with lock.hold(tmp_path / "run"):
                    held[0] += 1
                    most[0] = max(most[0], held[0])
                    time.sleep(0.001)
                    held[0] -= 1
            except UserError:
                refused[0] += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1 and refused[0] > 0


def test_a_folder_left_empty_is_removed(tmp_path):
    with pytest.raises(UserError, match="go together only"):
        run(tmp_path / "run", "--data", "x.jsonl")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: File exists"):
        run(tmp_path / "file")


def test_the_soak_reads_a_process():
    seen = soak.observe(os.getpid())
    assert seen["memory_mb"] > 50 and seen["files"] > 2 and seen["threads"] >= 1
