"""How oar_t's edges and propagation were chosen: recall of causal tokens on *validation* completions of the lab.

    python -m benchmarks.edges                     # 64 problems, 2 minutes on one core

Edge t -> u from the distribution at u, clean p and disturbed q: total variation; the drop of the written token's
probability; KL(p || q) clipped at 1.  Credit flows back as the strongest chain, I = max(d, max D I), or as noisy-or,
I = 1 - (1 - d) prod(1 - D I).  d is the same divergence at the answer tokens, their mean.  Everything under two edits: the
mask, and the policy's best other token.  Writes benchmarks/results/edges.json; benchmarks/recall.py reports on other,
test completions.
"""
import argparse
import json
from pathlib import Path

import torch
from transformers import DynamicCache

from benchmarks.recall import pick_correct, recall_at
from oar import data, lab, models, perturb, record
from oar.batch import random_stream
from oar.checkpoint import write_atomically
from oar.oracle import causal_tokens
from oar.probe import build_probe, segment
from oar.rollout import draw_uniforms, sample
from oar.total import strongest_chain

TOP, GROUP, LENGTH, BUDGET = 30, 4, 80, 16384
EDGES = ("total variation", "probability drop", "clipped KL")


def divergences(p: torch.Tensor, q: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """The three edge strengths from log-probabilities (..., V) twice and written tokens (...): (..., 3) in [0, 1]."""
    variation = (p.exp() - q.exp()).abs().sum(-1) / 2
    drop = (p.gather(-1, written[..., None]).exp() - q.gather(-1, written[..., None]).exp())[..., 0].clamp(min=0)
    return torch.stack([variation, drop, (p.exp() * (p - q)).sum(-1).clamp(0, 1)], -1)


@torch.no_grad()
def all_effects(model, probe, edits) -> tuple[torch.Tensor, torch.Tensor]:
    """direct (B, S, 3) and edges (B, S, S, 3), from whole logits: the lab's vocabulary is small."""
    mask, width = probe.reasoning_mask, probe.prompt_width
    direct, edges = torch.zeros(*mask.shape, 3), torch.zeros(*mask.shape, mask.shape[1], 3)
    out = model(input_ids=probe.ids, attention_mask=probe.mask.long(), position_ids=probe.position_ids, cache=DynamicCache(), use_cache=True)
    clean = out.logits.log_softmax(-1)                                               # (B, L, V)

    def read(suffixes) -> None:
        rows, begin = suffixes.rows, width + suffixes.start
        q = model(**suffixes.inputs).logits.log_softmax(-1)                          # (N, L', V)
        length = min(q.shape[1], probe.ids.shape[1] - begin - 1)
        moved = divergences(clean[rows, begin:begin + length], q[:, :length], probe.ids[rows, begin + 1:begin + 1 + length])
        moved *= mask[rows, suffixes.start + 1:suffixes.start + 1 + length, None]    # the state at column c predicts c + 1
        edges[rows, suffixes.tokens, suffixes.start + 1:suffixes.start + 1 + length] = moved
        n = torch.arange(len(rows))[:, None]
        answer = divergences(clean[torch.tensor(rows)[:, None], probe.positions[rows]], q[n, suffixes.positions], probe.targets[rows].clamp(min=0))
        weight = probe.position_mask[rows].float()
        direct[rows, suffixes.tokens] = (answer * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)

    perturb.for_suffixes(probe, edits, out.cache, BUDGET, read)
    later = torch.ones(mask.shape[1], mask.shape[1]).triu(1)
    return direct, edges * later[..., None]


def noisy_or(direct: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    credit = direct.clone()
    for t in reversed(range(direct.shape[1])):
        credit[:, t] = 1 - (1 - direct[:, t]) * (1 - edges[:, t] * credit).prod(1)
    return credit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--problems", type=int, default=64)
    args = parser.parse_args()
    policy = models.load("lab", torch.device("cpu"))
    examples = data.lab_examples("validation", args.problems, lab.INSTRUCTIONS, 1)
    batch = sample(policy, [data.encode_prompt(policy, e.problem) for e in examples], GROUP, LENGTH,
                   draw_uniforms(args.problems * GROUP, LENGTH, random_stream("edges")))
    rows, _ = pick_correct(policy, batch, [e.answer for e in examples for _ in range(GROUP)], GROUP)
    batch, owners = batch.rows(rows), [examples[row // GROUP] for row in rows]
    segments = [segment(policy.tokenizer, batch.row_ids(row), policy.eos_ids) for row in range(len(batch))]
    probe = build_probe(batch, segments, "answer_mean", policy.tokenizer.encode(lab.CONCLUSION), policy.tokenizer.pad_token_id)
    golds = [e.answer for e in owners]
    truths = {how: causal_tokens(policy, batch, segments, golds, how, LENGTH, BUDGET) for how in ("answer", "all")}
    truths["roles"] = lab.role_mask(record.lab_roles(policy, batch, owners), batch.completion_mask.shape[1], lambda role: role.matters)

    table = {}
    for edit in ("mask", "other"):
        edits = perturb.mask_edits(probe, policy.tokenizer.pad_token_id) if edit == "mask" else perturb.resample_edits(
            policy.model, probe, 0.0, torch.Generator(), BUDGET)
        direct, edges = all_effects(policy.model, probe, edits)
        for i, name in enumerate(EDGES):
            for way, propagate in (("strongest chain", strongest_chain), ("noisy-or", noisy_or)):
                credit = propagate(direct[..., i], edges[..., i])
                cells = {}
                for truth, marks in truths.items():
                    pairs = [(credit[row, :s.reasoning_end], marks[row, :s.reasoning_end]) for row, s in enumerate(segments)]
                    recalls = [recall_at(scores, causal, TOP) for scores, causal in pairs if causal.any()]
                    cells[truth] = round(sum(recalls) / len(recalls), 3)
                table[f"{edit}, {name}, {way}"] = cells
    result = Path(__file__).parent / "results" / "edges.json"
    write_atomically(result, json.dumps({"completions": len(batch), "top": TOP, "recall": table}, indent=1) + "\n")
    print(f"recall in the top {TOP} %, {len(batch)} validation completions\n\n| edit, edge, propagation | roles | answer | all | mean |\n|---|---|---|---|---|")
    for name, cells in table.items():
        print(f"| {name} | {cells['roles']:.2f} | {cells['answer']:.2f} | {cells['all']:.2f} | {sum(cells.values()) / 3:.2f} |")


if __name__ == "__main__":
    main()
