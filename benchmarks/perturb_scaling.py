"""OAR-P's time and memory against the length of the reasoning: serial, batched without sharing, ours.

    python -m benchmarks.perturb_scaling                                       # a tiny model, 32 to 512 tokens: 2 minutes
    python -m benchmarks.perturb_scaling --model PATH.gguf --lengths 32 64 128 256    # SmolLM2-135M: 12 minutes

One completion of random tokens with an answer at its end, every reasoning token masked in turn.

serial    the definition: one full forward per token (perturb.oar_p_serial)
plain     all disturbed sequences in batches of --tokens-per-pass, whole sequences, logits at every position
ours      perturb.oar_p with the same --tokens-per-pass

Peak memory is what a method needs on top of the weights (the caches of the C library included).  The largest difference
of scores is printed and must stay below 1e-5.  Medians of --repeats.  Writes benchmarks/results/perturb_scaling_NAME.json.
"""
import argparse
import json
import statistics
import time

import torch
from tqdm import tqdm

from benchmarks import measure
from benchmarks.cost import RESULTS, random_policy
from oar import models, perturb
from oar.batch import eval_mode
from oar.checkpoint import write_atomically
from oar.errors import exit_cleanly
from oar.probe import Probe, divergence, outcome, probe_logits

PROMPT, CONCLUSION = 96, 4      # a GSM8K question with its instruction has about a hundred tokens
VOCABULARY = 32768     # of the tiny model: a usual size


def random_probe(vocabulary: int, length: int) -> Probe:
    """prompt (96) + reasoning (`length`) + conclusion (4), the answer one token behind it."""
    ids = torch.randint(2, vocabulary, (1, PROMPT + length + CONCLUSION), generator=torch.Generator().manual_seed(length))
    return Probe("answer_mean", ids, torch.ones_like(ids).bool(), PROMPT, torch.arange(length + CONCLUSION)[None] < length,
                 torch.tensor([[ids.shape[1] - 1]]), torch.ones(1, 1).bool(), torch.tensor([[2]]))


@torch.no_grad()
def plain(model, probe: Probe, edits: torch.Tensor, token_budget: int) -> torch.Tensor:
    """OAR-P in batches, sharing nothing and keeping every position's logits."""
    importance, columns = torch.zeros(probe.reasoning_mask.shape), probe.reasoning_mask[0].nonzero()[:, 0]
    with eval_mode(model):
        clean = outcome(probe_logits(model, probe), probe)
        for chunk in columns.split(max(1, token_budget // probe.ids.shape[1])):
            ids = probe.ids.repeat(len(chunk), 1)
            ids[torch.arange(len(chunk)), PROMPT + chunk] = edits[0, chunk]
            logits = model(input_ids=ids, use_cache=False).logits                    # (rows, L, V)
            importance[0, chunk] = divergence(clean, outcome(logits[:, probe.positions[0]], probe), probe.kind)
    return importance.clamp(min=0)


def measured(run, repeats: int) -> tuple[float, float, torch.Tensor]:
    """Median seconds, peak MiB, scores."""
    seconds, peaks = [], []
    for _ in range(repeats):
        with measure.PeakMemory() as peak:
            start = time.perf_counter()
            scores = run()
            seconds.append(time.perf_counter() - start)
        peaks.append(peak.mib)
    return statistics.median(seconds), statistics.median(peaks), scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="", help="a folder or a .gguf file (default: a random model: three layers, width 128, V = 32768)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[32, 64, 128, 256, 512])
    parser.add_argument("--tokens-per-pass", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    device = torch.device("cpu")
    policy = models.load(args.model, device) if args.model else random_policy(models.load("lab", device).tokenizer, 128, VOCABULARY)
    model, budget = policy.model, args.tokens_per_pass
    path = RESULTS / f"perturb_scaling_{'real' if args.model else 'tiny'}.json"
    print("| reasoning tokens | serial s | plain s | ours s | plain / ours | serial MiB | plain MiB | ours MiB | plain / ours | largest difference |")
    print("|---" * 10 + "|")
    perturb.oar_p(model, random_probe(model.config.vocab_size, 16), torch.zeros(1, 20, dtype=torch.long), budget)     # warm-up
    for length in tqdm(args.lengths, disable=len(args.lengths) < 2):
        probe = random_probe(model.config.vocab_size, length)
        edits = perturb.mask_edits(probe, policy.tokenizer.pad_token_id)
        ways = {"serial": lambda: perturb.oar_p_serial(model, probe, edits), "plain": lambda: plain(model, probe, edits, budget),
                "ours": lambda: perturb.oar_p(model, probe, edits, budget)}
        results = {name: measured(run, args.repeats) for name, run in ways.items()}
        (serial, serial_mib, truth), (slow, slow_mib, a), (fast, fast_mib, b) = results.values()
        difference = max((a - truth).abs().max().item(), (b - truth).abs().max().item())
        new = {"length": length, "difference": difference, **{name: {"seconds": s, "mib": m} for name, (s, m, _) in results.items()}}
        tqdm.write(f"| {length} | {serial:.2f} | {slow:.2f} | {fast:.2f} | {slow / fast:.1f} | {serial_mib:.0f} | {slow_mib:.0f} | {fast_mib:.0f} | "
                   f"{slow_mib / fast_mib:.1f} | {difference:.0e} |")
        assert difference < 1e-5
        known = json.loads(path.read_text())["rows"] if path.exists() else []        # lengths of earlier runs stay
        rows = sorted([row for row in known if row["length"] != length] + [new], key=lambda row: row["length"])
        write_atomically(path, json.dumps({"machine": measure.machine(), "rows": rows}, indent=1) + "\n")
    print(f"medians of {args.repeats}; {measure.machine()}")


if __name__ == "__main__":
    exit_cleanly(main)
