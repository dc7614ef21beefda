"""Do OAR-P's and oar_f's scores keep their order under bfloat16, and is it faster?  (OAR-G always scores in float32.)

    python -m benchmarks.precision                                     # the lab, 1 minute
    python -m benchmarks.precision --model PATH.gguf                   # SmolLM2-135M, 4 minutes

The same completions are scored twice, in float32 and under bfloat16 autocast.  Printed: how many times faster bfloat16 is,
Spearman's rank correlation of the scores (mean and smallest over completions) and the share of reasoning tokens that the
gate puts on the same side.  Writes benchmarks/results/precision_NAME.json.
"""
import argparse
import json
from functools import partial

import torch
from scipy.stats import spearmanr

from benchmarks import measure, word_problems
from benchmarks.cost import RESULTS
from oar import data, models
from oar.batch import random_stream
from oar.checkpoint import write_atomically
from oar.credit import CreditConfig, score_importance
from oar.errors import exit_cleanly
from oar.probe import reasoning_mask, segment
from oar.reshape import reshape
from oar.rollout import draw_uniforms, sample

METHODS = ("oar_p", "oar_f")


def completions(policy):
    """A batch of 64 in the lab, of 8 from a real model."""
    if policy.is_lab:
        prompts = [data.encode_prompt(policy, e.problem) for e in data.lab_examples("validation", 8, 4, 0)]
        return sample(policy, prompts, 8, 80, draw_uniforms(64, 80, random_stream("precision")))
    prompts = [policy.tokenizer.encode(word_problems.prompt(e.problem)) for e in word_problems.examples(2, 0)]
    return sample(policy, prompts, 4, 48, draw_uniforms(8, 48, random_stream("precision")), stop_strings=word_problems.STOPS)


def compare(policy, batch, method: str) -> dict[str, float]:
    """Speed and agreement of bfloat16 with float32 for one method."""
    segments = [segment(policy.tokenizer, batch.row_ids(row), policy.eos_ids) for row in range(len(batch))]
    mask, config, scores, seconds = reasoning_mask(batch, segments), CreditConfig(method=method), {}, {}

    def score(dtype):
        with models.autocast(torch.device("cpu"), dtype):
            scores[dtype] = score_importance(policy, batch, segments, config, 1.0, random_stream("scores"), 8192)

    for dtype in (torch.float32, torch.bfloat16):
        seconds[dtype] = min(measure.seconds_of(partial(score, dtype)) for _ in range(2))
    exact, rounded = scores.values()
    ranks = [spearmanr(a[m], b[m]).statistic for a, b, m in zip(exact, rounded, mask) if m.sum() > 2]
    gates = [reshape(s, mask, threshold=config.threshold, boost=config.boost, floor=config.floor, gate="suppress_only", renormalise=False) < 1
             for s in (exact, rounded)]
    return {"speed": seconds[torch.float32] / seconds[torch.bfloat16], "spearman": sum(ranks) / len(ranks), "worst": min(ranks),
            "same_side": (gates[0] == gates[1])[mask].float().mean().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="lab", help='"lab", a folder or a .gguf file')
    policy = models.load(parser.parse_args().model, torch.device("cpu"))
    batch, name = completions(policy), "lab" if policy.is_lab else "real"
    print("| method | times faster | Spearman, mean | smallest | same side of the gate |\n|---|---|---|---|---|")
    table = {method: compare(policy, batch, method) for method in METHODS}
    for method, row in table.items():
        print(f"| `{method}` | {row['speed']:.2f} | {row['spearman']:.3f} | {row['worst']:.3f} | {row['same_side']:.1%} |")
    print(f"{len(batch)} completions; {measure.machine()}")
    write_atomically(RESULTS / f"precision_{name}.json", json.dumps({"machine": measure.machine(), "table": table}, indent=1) + "\n")


if __name__ == "__main__":
    exit_cleanly(main)
