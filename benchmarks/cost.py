"""Seconds per training step by method, as a ratio to GRPO measured in the same run.

    python -m benchmarks.cost                                          # the lab, about 3 minutes on two cores
    python -m benchmarks.cost --model PATH.gguf --methods grpo oar_g oar_f oar_p --repeats 3     # SmolLM2-135M, 8 minutes
    python -m benchmarks.cost --grow                                   # growth with group size, length and width, 5 minutes

Every repeat takes the methods in turn on the same problems, from the same policy (so all of them attribute the same
completions), after one warm-up; medians are printed, and the seconds that the step's matrix products alone would take at the
speed of one large product.  The lab is graded as in training, so completions of groups that are
all right or all wrong need no attribution.  A real model answers word problems, 2 x 4 completions of 64 tokens,
and every completion is attributed.  Writes benchmarks/results/cost_lab.json, cost_real.json or cost_growth.json.
"""
import argparse
import json
import statistics
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import measure, word_problems
from oar import data, models
from oar.checkpoint import write_atomically
from oar.errors import exit_cleanly

RESULTS = Path(__file__).parent / "results"
LAB = dict(group_size=8, max_new_tokens=80, lr=1e-4, tokens_per_pass=8192)
REAL = dict(group_size=4, max_new_tokens=64, lr=1e-6, tokens_per_pass=8192)
GROWTH = {"group size": [4, 8, 16, 32], "completion length": [32, 64, 128, 256], "width": [64, 128, 256, 512]}
GROWTH_METHODS = ("grpo", "oar_g", "oar_p")


def step_of(policy, method: str, repeat: int) -> dict[str, float]:
    """Seconds per phase and peak memory of one step on the problems of this repeat."""
    with measure.PeakMemory() as peak:
        if policy.is_lab:
            examples = data.lab_examples("train", 8, 4, repeat)
            prompts = [data.encode_prompt(policy, e.problem) for e in examples]
            seconds = measure.training_step(policy, prompts, method, seed=repeat, golds=[e.answer for e in examples], **LAB)
        else:
            prompts = [policy.tokenizer.encode(word_problems.prompt(e.problem)) for e in word_problems.examples(2, repeat)]
            policy = policy._replace(eos_ids=())                                     # 64 tokens each
            seconds = measure.training_step(policy, prompts, method, seed=repeat, **REAL)
    return seconds | {"peak": peak.mib}


def cost(policy, methods: list[str], repeats: int) -> dict[str, dict[str, float]]:
    """Medians by method: seconds, ratio to the first method, phases, peak memory in MiB; operations of the matrix products."""
    runs, operations = {method: [] for method in methods}, {}
    for method in tqdm(methods, desc="warm-up"):
        with measure.Operations() as counted:
            step_of(policy, method, 0)
        operations[method] = counted.total
    for repeat in tqdm(range(1, repeats + 1)):
        for method in methods:
            runs[method].append(step_of(policy, method, repeat))
    baseline = [line["total"] for line in runs[methods[0]]]
    return {method: {name: statistics.median(line[name] for line in lines) for name in ("total", *measure.PHASES, "peak", "tokens")}
            | {"operations": operations[method], "ratio": statistics.median(line["total"] / base for line, base in zip(lines, baseline))} for method, lines in runs.items()}


def random_policy(tokenizer, width: int, vocabulary: int | None = None):
    """A randomly initialised three-layer Llama that never stops by itself."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary or len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024)
    return models.Policy(LlamaForCausalLM(config), tokenizer, (), False)


def growth(tokenizer) -> dict[str, dict]:
    """Seconds per step against each size, the others at their second value, with the fitted exponent."""
    prompts, table = [tokenizer.encode(e.problem) for e in data.lab_examples("train", 2, 4, 0)], {}
    for name, sizes in tqdm(GROWTH.items()):
        seconds = {method: [] for method in GROWTH_METHODS}
        for size in sizes:
            setting = {other: values[1] for other, values in GROWTH.items()} | {name: size}
            policy = random_policy(tokenizer, setting["width"])
            for method in GROWTH_METHODS:
                steps = [measure.training_step(policy, prompts, method, group_size=setting["group size"], seed=repeat, lr=1e-4,
                                               max_new_tokens=setting["completion length"], tokens_per_pass=8192) for repeat in range(4)]
                seconds[method].append(statistics.median(s["total"] for s in steps[1:]))
        table[name] = {method: {"sizes": sizes, "seconds": s, "exponent": measure.fitted_exponent(sizes, s)} for method, s in seconds.items()}
    return table


def shares_of_limit(policy, rollout_tokens_per_second: float) -> dict[str, float]:
    """The machine's matrix products, measured now, and the share of them that a forward of 2048 tokens and the rollout reach."""
    model, config = policy.model, policy.model.config
    body = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name and "lm_head" not in name)
    limit = measure.matrix_limit(2048, config.hidden_size, config.intermediate_size)
    ids = torch.randint(config.vocab_size, (16, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seconds = statistics.median(measure.seconds_of(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1)) for _ in range(5))
    return {"operations": limit, "forward": 2 * body * ids.numel() / seconds / limit,
            "rollout": 2 * (body + config.vocab_size * config.hidden_size) * rollout_tokens_per_second / limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="lab", help='"lab", a folder or a .gguf file')
    parser.add_argument("--methods", nargs="+", default=["grpo", "entropy", "ktae", "oar_g", "oar_f", "oar_p", "oar_t", "oar_tg"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--grow", action="store_true", help="growth of the cost instead")
    args = parser.parse_args()
    policy = models.load(args.model, torch.device("cpu"))
    if args.grow:
        table, name = growth(policy.tokenizer), "growth"
        print("| size | " + " | ".join(f"`{m}`: s per step | exponent" for m in GROWTH_METHODS) + " |\n" + "|---" * (1 + 2 * len(GROWTH_METHODS)) + "|")
        for size, by_method in table.items():
            cells = [f"{' / '.join(f'{s:.2f}' for s in row['seconds'])} | {row['exponent']:.2f}" for row in by_method.values()]
            print(f"| {size} {', '.join(map(str, GROWTH[size]))} | " + " | ".join(cells) + " |")
    else:
        table, name = cost(policy, args.methods, args.repeats), "lab" if policy.is_lab else "real"
        first = table[args.methods[0]]
        limit = shares_of_limit(policy, first["tokens"] / first["rollout"])
        print(f"| method | s per step | ratio to {args.methods[0]} | rollout | attribution | update | peak MiB | products alone, s |")
        print("|---" * 8 + "|")
        for method, row in table.items():
            print(f"| `{method}` | {row['total']:.2f} | {row['ratio']:.2f} | " + " | ".join(f"{row[p]:.2f}" for p in measure.PHASES)
                  + f" | {row['peak']:.0f} | {row['operations'] / limit['operations']:.2f} |")
        print(f"medians of {args.repeats} repeats; float32 matrix products reach {limit['operations'] / 1e9:.0f} G operations a second here, "
              f"a forward of 2048 tokens {limit['forward']:.0%} of that, the rollout {limit['rollout']:.0%}")
    print(measure.machine())
    result = {"machine": measure.machine(), "repeats": args.repeats, "table": table} | ({} if args.grow else {"limit": limit})
    write_atomically(RESULTS / f"cost_{name}.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    exit_cleanly(main)
