"""What a run survives: real processes killed, starved of disk space and started twice, and the tests of every other fault.

    python -m benchmarks.faults                    # everything but the soak: about half an hour on one core
    python -m benchmarks.faults --kills 4 --only 'training*'
    python -m benchmarks.faults --soak             # 2,000 lab steps in one process, watched from outside

Every training process works on the same short lab run (`SETTING`); after the fault it is resumed with `--resume`, and its
folder must end like that of the run nobody disturbed: weights and optimiser state bit for bit, and metrics.jsonl and
samples.jsonl record for record (times and memory apart), none missing and none repeated.  A try that ends otherwise, or that
cannot be resumed, counts as lost.  Rows marked "tests" run test functions in a pytest process; a failed one counts as lost.
The full disk is a tmpfs of a few MiB, which needs the right to mount.  Every finished row goes into benchmarks/results/faults.json.
"""
import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch

from benchmarks import soak
from oar.checkpoint import latest_checkpoint, read_records, write_atomically
from oar.errors import exit_cleanly

ROOT, RESULT = Path(__file__).parents[1], Path(__file__).parent / "results" / "faults.json"
STEPS = 12
SETTING = (f"--method oar_g --steps {STEPS} --prompts-per-step 2 --group-size 4 --max-new-tokens 72 --validation-size 8 --eval-every 4 "
           "--save-every 2 --device cpu --quiet").split()
TIMES = ("seconds_", "share_", "memory_mb")
TESTS = {"a number that is not finite, a reward that cannot be had": "tests/test_numbers.py",
         "out of memory": "tests/test_halving.py",
         "bad input: data, flags, models": "tests/test_input.py tests/test_data.py tests/test_models.py tests/test_errors.py",
         "hostile model output": "tests/test_hostile.py"}


# --------------------------------------------------------------------------------------------------------------------
# processes

def start(*command: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "HF_HUB_OFFLINE": "1"})


def training(run: Path) -> subprocess.Popen:
    """Begin the run, or go on with it."""
    return start("train.py", *(("--resume", run, "--quiet") if (run / "config.json").exists() else (*SETTING, "--out", run)))


def finish(run: Path) -> bool:
    """Train to the end, undisturbed; False when that fails."""
    process = training(run)
    _, said = process.communicate()
    if process.returncode:
        print(f"{run} ended with code {process.returncode}: {said[-2000:]}", file=sys.stderr)
    return process.returncode == 0


def used(process: subprocess.Popen) -> float:
    """Processor seconds of a running process and its children (Linux): moments that depend neither on the machine nor on its load."""
    def of(pid: str) -> float:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            children = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
        except OSError:                              # it has just ended
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(of, children))
    return of(str(process.pid))


def used_by_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def kill_when(process: subprocess.Popen, moment) -> bool:
    """SIGKILL the process as soon as `moment()` is true; False when it ended before."""
    while process.poll() is None:
        if moment():
            process.kill()
            process.communicate()
            return process.returncode == -signal.SIGKILL
        time.sleep(0.001)
    process.communicate()
    return False


def outcome(run: Path) -> tuple:
    """All that a run leaves behind, except for times and memory."""
    records = [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in read_records(run / "metrics.jsonl")]
    last = latest_checkpoint(run)
    return last.name, records, read_records(run / "samples.jsonl"), (last / "model.safetensors").read_bytes(), plain(torch.load(last / "trainer.pt"))


def plain(state):
    """Tensors as bytes, so that == compares bit by bit."""
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if isinstance(state, (list, tuple)):
        return list(map(plain, state))
    return {name: plain(value) for name, value in state.items()} if isinstance(state, dict) else state


def same(run: Path, reference: Path) -> bool:
    """Whether a disturbed run ended like the undisturbed one."""
    return outcome(run) == outcome(reference)


# --------------------------------------------------------------------------------------------------------------------
# training

def kills(base: Path, reference: Path, tries: int, longest: float, rng: random.Random) -> list[bool]:
    """`tries` SIGKILLs, each within the first `longest` processor seconds; 0: in the middle of a checkpoint write."""
    results, run, hits = [], base / "run-0", 0
    while len(results) < tries:
        process = training(run)
        if not longest:
            passed, delay = rng.randrange(1, 4), rng.uniform(0, 0.03)
            hit = kill_when(process, lambda seen=set(): _write_begun(run, seen, passed) and not time.sleep(delay))
            hit = hit and any((run / "checkpoints").glob("writing_*"))
        else:
            hit = kill_when(process, lambda until=rng.uniform(0, longest): used(process) > until)
        hits += hit
        results += [None] * hit                      # judged when its folder is finished
        if process.returncode == 0 or len(results) == tries:
            fine = finish(run) and same(run, reference)
            results = [fine if result is None else result for result in results]
            run = base / f"run-{hits}-{len(list(base.iterdir()))}"
    return results


def _write_begun(run: Path, seen: set, count: int) -> bool:
    """Whether the checkpoint number `count` of this process is being written."""
    steps = {path.name for path in (run / "checkpoints").glob("step_*")}
    if not seen:
        seen |= steps | {""}
    return len(steps - seen) >= count - 1 and any((run / "checkpoints").glob("writing_*"))


def polite_signals(base: Path, reference: Path, numbers: list[int], rng: random.Random) -> list[bool]:
    """SIGINT and SIGTERM: the step is finished and saved, the exit code says which, the last line how to resume."""
    results = []
    for i, number in enumerate(numbers):
        run, wanted = base / f"run-{i}", rng.randrange(1, 4)
        process = training(run)
        while len(read_records(run / "metrics.jsonl")) < wanted:
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate()
        saved = int(latest_checkpoint(run).name[5:]) if latest_checkpoint(run) else 0
        told = f"after step {saved} of {STEPS}; go on with  python train.py --resume {run}" in said
        whole = [r["step"] for r in read_records(run / "metrics.jsonl")] == list(range(saved + 1))
        results.append(process.returncode == 128 + number and told and whole and finish(run) and same(run, reference))
    return results


def damaged(base: Path, reference: Path) -> list[bool]:
    """The last checkpoint is damaged: it is passed over with a message and the one before is used."""
    def halve(file: Path) -> None:
        os.truncate(file, file.stat().st_size // 2)

    def flip(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    results = []
    for i, (harm, name) in enumerate([(halve, "model.safetensors"), (flip, "model.safetensors"), (flip, "trainer.pt"), (halve, "manifest.json"),
                                      (Path.unlink, "trainer.pt"), (Path.unlink, "manifest.json")]):
        run = base / f"run-{i}"
        shutil.copytree(reference, run)
        harm(latest_checkpoint(run) / name)
        process = training(run)
        _, said = process.communicate()
        results.append(process.returncode == 0 and " is damaged" in said and same(run, reference))
    return results


def second_process(base: Path, reference: Path) -> list[bool]:
    """A run that is being trained is refused to others in one line; it ends undisturbed."""
    run = base / "run"
    process = training(run)
    while not (run / "config.json").exists():
        time.sleep(0.01)
    results = []
    for command in (("--resume", run), (*SETTING, "--out", run)):
        second = start("train.py", *command)
        _, said = second.communicate()
        results.append(second.returncode == 2 and said.count("\n") == 1 and "error: " in said)
    process.communicate()
    return [fine and process.returncode == 0 and same(run, reference) for fine in results]


def full_disk(base: Path, reference: Path) -> list[bool] | None:
    """The disk fills up at another place each time; one line, exit code 2, and with more room the run goes on. None: may not mount."""
    results = []
    for size in ("8k", "16k", "64k", "4m", "8m", "12m", "20m"):
        disk = base / size
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True).returncode:
            return None
        try:
            process = training(disk / "run")
            _, said = process.communicate()
            one_line = process.returncode == 2 and said.count("\n") == 1 and "No space left" in said
            subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
            results.append(one_line and finish(disk / "run") and same(disk / "run", reference))
        finally:
            subprocess.run(["umount", disk], check=True)
    return results


# --------------------------------------------------------------------------------------------------------------------
# evaluation and grading

def kills_of_commands(base: Path, command: list, output: str, tries: int, rng: random.Random) -> list[bool]:
    """SIGKILLs of evaluate.py at random moments; the same command takes it up and must end with the same files."""
    before = used_by_children()
    if start("evaluate.py", *command, "--out", base / "whole").wait():
        return [False] * tries
    longest, results, out = used_by_children() - before, [], base / "cut"
    while len(results) < tries:
        process, until = start("evaluate.py", *command, "--out", out), rng.uniform(0.2, 1) * longest
        if kill_when(process, lambda: used(process) > until):
            results.append(None)
        else:
            results, out = _judge(results, base, out, output), base / f"cut-{len(results)}-{random.random()}"
    start("evaluate.py", *command, "--out", out).wait()
    return _judge(results, base, out, output)


def _judge(results: list, base: Path, out: Path, output: str) -> list[bool]:
    fine = all((out / name).exists() and (out / name).read_bytes() == (base / "whole" / name).read_bytes() for name in (output, "results.json"))
    return [fine if result is None else result for result in results]


def outputs_to_grade(path: Path) -> Path:
    rows = [{"gold": f"x^{i} + {i}", "text": f"so \\boxed{{{i} + x^{{{i}}}}}", "label": 1} for i in range(2, 600)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# --------------------------------------------------------------------------------------------------------------------
# the table

def tests(files: str) -> list[bool]:
    """One result per test that ran."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run([sys.executable, "-m", "pytest", "-q", *files.split(), f"--junitxml={report}"], cwd=ROOT, stdout=subprocess.DEVNULL)
        cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    return [case.find("failure") is None and case.find("error") is None for case in cases]


def rows(base: Path, reference: Path, count: int, longest: float) -> dict:
    """{fault: function that tries it}; `longest` is how many processor seconds an undisturbed run takes."""
    rng, few = random.Random(0), max(1, count // 4)

    def place(name: str) -> Path:
        (base / name).mkdir()
        return base / name

    sampled = ["--samples", "8", "--limit", "40", "--batch-size", "16", "--device", "cpu", "--quiet"]
    graded = ["--grade", outputs_to_grade(base / "outputs.jsonl"), "--quiet"]
    return {
        "training: SIGKILL at a random moment": lambda: kills(place("random"), reference, count, longest, rng),
        "training: SIGKILL during a checkpoint write": lambda: kills(place("writes"), reference, few, 0, rng),
        "training: SIGINT, SIGTERM": lambda: polite_signals(place("signals"), reference, [signal.SIGINT, signal.SIGTERM] * 2, rng),
        "damaged last checkpoint": lambda: damaged(place("damaged"), reference),
        "second process in the folder": lambda: second_process(place("second"), reference),
        "full disk": lambda: full_disk(place("disk"), reference),
        "evaluate.py: SIGKILL": lambda: kills_of_commands(place("evaluate"), sampled, "completions.jsonl", few, rng),
        "evaluate.py --grade: SIGKILL": lambda: kills_of_commands(place("grade"), graded, "verdicts.jsonl", few, rng),
        **{f"{name} (tests)": partial(tests, files) for name, files in TESTS.items()}}


def record(**new) -> None:
    """Put something into the result file; rows of the table replace those of the same fault."""
    old = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if "faults" in new:
        known = {row["fault"]: row for row in [*old.get("faults", []), *new["faults"]]}
        new["faults"] = list(known.values())
    write_atomically(RESULT, json.dumps(old | new | {"torch": torch.__version__}, indent=1) + "\n")


def table(count: int, pattern: str) -> int:
    """Try every fault whose name matches, print and record each row as soon as it is there; the number of lost tries."""
    print("| fault | tries | survived | lost |\n|---|---|---|---|", flush=True)
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        base, before = Path(folder), used_by_children()
        if not finish(base / "reference"):
            sys.exit("the undisturbed run failed")
        longest = used_by_children() - before
        for name, attempt in rows(base, base / "reference", count, longest).items():
            if not fnmatchcase(name, pattern):
                continue
            results = attempt() or []
            tries, survived = len(results), sum(results)
            record(faults=[{"fault": name, "tries": tries, "survived": survived, "lost": tries - survived}])
            print(f"| {name} | {tries or 'none: no right to mount'} | {survived} | {tries - survived} |", flush=True)
            lost += tries - survived
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--kills", type=int, default=32, help="random kills of a training process; a quarter as many of each other kind")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only the faults whose name matches, e.g. 'evaluate.py*'")
    parser.add_argument("--soak", action="store_true", help="only the soak")
    args = parser.parse_args()
    if args.soak:
        soaked = soak.run()
        record(soak=soaked)
        sys.exit(not soaked["flat"])
    sys.exit(table(args.kills, args.only) > 0)


if __name__ == "__main__":
    exit_cleanly(main)
