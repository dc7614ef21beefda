"""A long run in one process, watched from outside: memory flat, files and processes constant, no record missing.

    python -m benchmarks.faults --soak             # writes its row into benchmarks/results/faults.json

2,000 lab steps of 1 x 4 completions, attribution, checkpoints and validation included.
"""
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from oar.checkpoint import read_records

ROOT = Path(__file__).parents[1]
STEPS, WARM_UP = 2000, 200
SETTING = (f"--steps {STEPS} --prompts-per-step 1 --group-size 4 --max-new-tokens 72 --validation-size 16 --eval-every 200 "
           "--save-every 100 --device cpu --quiet").split()


def observe(pid: int) -> dict[str, float]:
    """Resident memory in MiB, open files, threads and child processes of a process (Linux)."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {"memory_mb": int(status["VmRSS"].split()[0]) / 1024, "files": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": int(status["Threads"]), "children": len(children)}


def run() -> dict:
    """Run it; prints and returns the figures, `flat` being the verdict."""
    with tempfile.TemporaryDirectory() as folder:
        out, seen, began = Path(folder) / "run", [], time.monotonic()
        process = subprocess.Popen([sys.executable, "train.py", *SETTING, "--out", str(out)], cwd=ROOT, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            time.sleep(1)
            try:
                step = sum(1 for _ in open(out / "metrics.jsonl", "rb")) - 1
                seen.append({"step": step, **observe(process.pid)})
            except (OSError, KeyError):              # not there yet, or ending just now
                continue
        records = read_records(out / "metrics.jsonl")
    warm = [s for s in seen if WARM_UP <= s["step"] < STEPS]
    tenth = max(1, len(warm) // 10)
    change = {name: [statistics.median_high(s[name] for s in part) for part in (warm[:tenth], warm[-tenth:])] for name in seen[0]}
    (first, last), counts = change["memory_mb"], {name: change[name] for name in ("files", "threads", "children")}
    result = {"steps": STEPS, "seconds": round(time.monotonic() - began), "exit_code": process.returncode, "memory_mb": [round(first, 1), round(last, 1)],
              "growth": round(last / first - 1, 4), **counts, "complete": [r["step"] for r in records] == list(range(STEPS + 1))}
    steady = all(before == after for before, after in counts.values())
    result["flat"] = process.returncode == 0 and result["growth"] < 0.05 and steady and result["complete"]
    print(f"{STEPS} steps in {result['seconds']} s: memory {first:.0f} -> {last:.0f} MiB ({result['growth']:+.1%} after step {WARM_UP}), "
          + ", ".join(f"{name} {before} -> {after}" for name, (before, after) in counts.items()) + ", "
          f"metrics {'complete' if result['complete'] else 'INCOMPLETE'}")
    return result
