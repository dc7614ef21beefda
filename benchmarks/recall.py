"""Do importance scores find the tokens that decide the answer?  Recall of causal tokens in the top K % of each ranking.

    python -m benchmarks.recall                                        # the lab, 240 completions: 10 minutes on one core
    python -m benchmarks.recall --model PATH.gguf --block 8 --completions 36 --problems 240 --max-new-tokens 40 --temperature 0.5
                                                                       # SmolLM2-135M on easy word problems: 25 minutes
    python -m benchmarks.recall --model PATH.gguf --data FILE.jsonl    # ... on problems of yours

Of each problem the first correct completion among G sampled ones is taken.  Its causal tokens come from the two oracles
(oar/oracle.py) and, in the lab, from the roles known by construction.  A ranking's recall at K is the share of the
causal tokens among its top K % of the reasoning tokens; ties count by their expectation, and `ceiling` is what a perfect
ranking would reach.  Means over completions, with 95 % bootstrap intervals (completions resampled, 2000 times); claims
are judged by paired differences.

Work goes problem block by problem block, every finished one is kept in --out, and an interrupted run goes on from there.
Writes benchmarks/results/recall_NAME.json and recall.png in --out.
"""
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import HfArgumentParser

from benchmarks import recall_report, word_problems
from oar import baselines, credit, data, lab, models, record
from oar.batch import random_stream
from oar.checkpoint import append_jsonl, read_records, write_atomically
from oar.errors import UserError, exit_cleanly
from oar.flags import flag, parse_flags
from oar.oracle import ORACLES, causal_tokens
from oar.probe import PROBES, reasoning_mask, segment
from oar.rollout import draw_uniforms, sample
from oar.verify import is_correct

MAIN_PROBE = recall_report.MAIN_PROBE
TOP = (5, 10, 20, 30, 40, 50)     # per cent
PROBED = {                        # rankings that depend on the probe: name -> settings of CreditConfig
    "oar_p": dict(method="oar_p"),
    "oar_p, other": dict(method="oar_p", perturb="other"),
    "oar_g": dict(method="oar_g"),
    "oar_g, 8 draws": dict(method="oar_g", noise_draws=8),
    "oar_f": dict(method="oar_f", fisher_samples=4),
    "oar_t, mask": dict(method="oar_t", perturb="mask"),
    "oar_t": dict(method="oar_t"),
    "oar_tg": dict(method="oar_tg"),
}


@dataclass
class Config:
    model: str = flag("lab", '"lab", a hub id, a local folder or a .gguf file.')
    data: str = flag("", "JSONL file of problems (default: the lab's test split, or easy word problems for a real model).")
    name: str = flag("", "Name of the result file (default: lab or real).")
    completions: int = flag(240, "Correct completions to collect, each of another problem.")
    problems: int = flag(2000, "Most problems to try.")
    probed: str = flag("", "Rankings repeated for every probe, separated by commas (default: all in the lab, oar_p for a real model).")
    block: int = flag(16, "Problems sampled together.")
    group_size: int = flag(8, "Completions per problem (KTAE compares them).")
    max_new_tokens: int = flag(80, "Longest completion.")
    temperature: float = flag(1.0, "Sampling temperature.")
    seed: int = flag(0, "Seed of problems, sampling and attribution.")
    tokens_per_pass: int = flag(32768, "Tokens per forward: memory only.")
    out: str = flag("", "Folder of the records (default: runs/recall-NAME).")
    quiet: bool = flag(False, "No progress bar.")


def load_problems(policy, config: Config) -> tuple[list, list[list[int]], list[str]]:
    """(examples, prompts, stop strings)."""
    if policy.is_lab:
        examples = data.lab_examples("test", config.problems, lab.INSTRUCTIONS, config.seed)
    elif not config.data:
        examples = word_problems.examples(config.problems, config.seed)
        return examples, [policy.tokenizer.encode(word_problems.prompt(e.problem)) for e in examples], word_problems.STOPS
    else:
        examples = data.read_jsonl(config.data, limit=config.problems)
    return examples, [data.encode_prompt(policy, e.problem) for e in examples], data.stop_strings(policy)


def pick_correct(policy, batch, golds: list, group_size: int) -> tuple[list[int], torch.Tensor]:
    """Rows of the first correct completion with reasoning of each group; KTAE's key values of the whole batch, (B, T)."""
    right = [is_correct(text, gold) for text, gold in zip(batch.texts, golds)]
    keys = baselines.ktae(batch, torch.zeros(len(batch)), torch.tensor(right).float(), group_size, policy.eos_ids)
    cuts = [segment(policy.tokenizer, batch.row_ids(row), policy.eos_ids) for row in range(len(batch))]
    usable = [r and cut.answered and cut.reasoning_end > 1 for r, cut in zip(right, cuts)]
    groups = [range(start, start + group_size) for start in range(0, len(batch), group_size)]
    return [next(row for row in group if usable[row]) for group in groups if any(usable[row] for row in group)], keys


def rankings(policy, batch, segments, keys: torch.Tensor, config: Config, block: int) -> dict[str, torch.Tensor]:
    """Every ranking's scores (B, T), named "method" or "method | probe"."""
    def score(probe=MAIN_PROBE, **settings):
        chosen = credit.CreditConfig(probe=probe, **settings)
        stream = random_stream(config.seed, block, probe, sorted(settings.items()))
        return credit.score_importance(policy, batch, segments, chosen, config.temperature, stream, config.tokens_per_pass)

    repeated = config.probed.split(",") if config.probed else list(PROBED) if policy.is_lab else ["oar_p"]
    place = torch.arange(batch.completion_ids.shape[1]).float().expand(len(batch), -1)
    scores = {"random": score(method="random"), "position": place, "entropy": score(method="entropy"), "ktae": keys}
    return scores | {f"{name} | {probe}": score(probe, **settings) for probe in PROBES
                     for name, settings in PROBED.items() if probe == MAIN_PROBE or name in repeated}


def recall_at(scores: torch.Tensor, causal: torch.Tensor, top: float) -> float:
    """Share of the causal tokens among the top `top` % of n tokens, (n,) twice; ties at the edge by expectation."""
    k = max(1, round(len(scores) * top / 100))
    edge = scores.sort(descending=True).values[k - 1]
    above, level = scores > edge, scores == edge
    hits = (causal & above).sum() + (causal & level).sum() * (k - above.sum()) / level.sum()
    return (hits / causal.sum()).item()


def score_block(policy, config: Config, block: int, examples, prompts, stops) -> list[dict]:
    """Sample a block of problems and turn each chosen completion into one record."""
    generator = random_stream(config.seed, block, "rollout")
    uniforms = draw_uniforms(len(prompts) * config.group_size, config.max_new_tokens, generator)
    batch = sample(policy, prompts, config.group_size, config.max_new_tokens, uniforms, config.temperature, stop_strings=stops)
    owners = [e for e in examples for _ in range(config.group_size)]
    rows, keys = pick_correct(policy, batch, [e.answer for e in owners], config.group_size)
    if not rows:
        return []
    batch, owners = batch.rows(rows), [owners[row] for row in rows]
    keys = keys[rows, :batch.completion_ids.shape[1]]
    segments = [segment(policy.tokenizer, batch.row_ids(row), policy.eos_ids) for row in range(len(batch))]
    truths = {how: causal_tokens(policy, batch, segments, [e.answer for e in owners], how, config.max_new_tokens,
                                 config.tokens_per_pass, stops) for how in ORACLES}
    if policy.is_lab:
        roles = record.lab_roles(policy, batch, owners)
        truths = {"roles": lab.role_mask(roles, batch.completion_mask.shape[1], lambda role: role.matters)} | truths
    reasoning, scores, records = reasoning_mask(batch, segments), rankings(policy, batch, segments, keys, config, block), []
    for row, m in enumerate(reasoning):
        causal = {truth: marks[row][m] for truth, marks in truths.items()}
        rows_scores = {name: s[row][m] for name, s in scores.items()}
        recall = {truth: {name: [round(recall_at(s, c, k), 4) for k in TOP]
                          for name, s in (rows_scores | {"ceiling": c.float()}).items()} for truth, c in causal.items() if c.any()}
        records.append({"block": block, "id": owners[row].id, "text": batch.texts[row], "tokens": int(m.sum()),
                        "causal": {truth: int(c.sum()) for truth, c in causal.items()}, "recall": recall})
    return records


def collect(policy, config: Config, out: Path) -> tuple[list[dict], int]:
    """Records of finished blocks, and the others' computed now; how many problems were tried."""
    settings = {k: v for k, v in asdict(config).items() if k not in ("completions", "quiet", "out", "tokens_per_pass", "name")}
    if (out / "config.json").exists() and json.loads((out / "config.json").read_text()) != settings:
        raise UserError(f"--out {out}: holds records made with other settings")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "config.json", json.dumps(settings, indent=1) + "\n")
    examples, prompts, stops = load_problems(policy, config)
    kept = {line["block"]: line["records"] for line in read_records(out / "blocks.jsonl")}
    records, block = [], 0
    bar = tqdm(total=config.completions, desc="correct completions", disable=config.quiet, dynamic_ncols=True)
    while len(records) < config.completions and block * config.block < len(examples):
        part = slice(block * config.block, (block + 1) * config.block)
        if block not in kept:
            kept[block] = score_block(policy, config, block, examples[part], prompts[part], stops)
            append_jsonl(out / "blocks.jsonl", {"block": block, "records": kept[block]})
        records += kept[block]
        bar.update(len(kept[block]))
        block += 1
    bar.close()
    return records[:config.completions], min(len(examples), block * config.block)


def main() -> None:
    config, = parse_flags(HfArgumentParser(Config, description=__doc__.split("\n")[0], allow_abbrev=False), sys.argv[1:])
    if config.group_size < 2 or min(config.completions, config.problems, config.block, config.max_new_tokens) < 1 or config.temperature <= 0:
        raise UserError("--group-size must be at least 2, --temperature and the other counts positive")
    policy = models.load(config.model, models.pick_device("cpu"))
    config.name = config.name or ("lab" if policy.is_lab else "real")
    out = Path(config.out or f"runs/recall-{config.name}")
    records, tried = collect(policy, config, out)
    if not records:
        raise UserError(f"{config.model} solved none of {tried} problems; try easier ones (--data) or a lower --temperature")
    summary = recall_report.summarise(records, TOP)
    summary["setting"] = {"model": Path(config.model).name, "problems tried": tried, "group size": config.group_size,
                          "temperature": config.temperature, "seed": config.seed, "top": TOP}
    result = Path(__file__).parent / "results" / f"recall_{config.name}.json"
    result.parent.mkdir(exist_ok=True)
    write_atomically(result, json.dumps(summary, indent=1) + "\n")
    say = partial(print, flush=True)
    recall_report.show(summary, TOP, say)
    recall_report.picture(summary, TOP, out / "recall.png")
    say(f"\nwrote {result.relative_to(Path.cwd()) if result.is_relative_to(Path.cwd()) else result}, {out / 'recall.png'}")


if __name__ == "__main__":
    exit_cleanly(main)
