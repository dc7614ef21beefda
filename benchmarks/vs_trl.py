"""The same GRPO steps through TRL's GRPOTrainer and through this project: seconds, tokens per second, peak memory.

    pip install -r requirements-dev.txt                                # TRL is there
    python -m benchmarks.vs_trl                                        # the lab, 3 minutes
    python -m benchmarks.vs_trl --model PATH.gguf --prompts 2 --group-size 4 --max-new-tokens 64 --steps 3    # SmolLM2-135M

Same model, problems, group size, completion length, AdamW, learning rate, float32, whole batch in one pass, no reference
model, no logging.  Lab completions end by themselves; a real model's all get --max-new-tokens tokens.  The two alternate, --rounds times; medians of steps are printed.  Writes benchmarks/results/vs_trl_NAME.json.
"""
import argparse
import copy
import json
import statistics
import tempfile
import time

import torch
from tqdm import tqdm

from benchmarks import measure, word_problems
from benchmarks.cost import RESULTS
from oar import data, models
from oar.checkpoint import write_atomically
from oar.errors import UserError, exit_cleanly
from oar.verify import is_correct


def load_problems(policy, count: int) -> list[data.Example]:
    """Lab problems, or easy word problems for a real model; `problem` is the prompt's text."""
    if policy.is_lab:
        return data.lab_examples("train", count, 4, 0)
    return [data.Example(word_problems.prompt(e.problem), e.answer, e.id) for e in word_problems.examples(count, 0)]


def ours(policy, examples: list[data.Example], args) -> list[tuple[float, int]]:
    """Seconds and tokens of every step; measure.training_step starts each from the same weights."""
    lines = []
    for step in range(args.steps):
        part = examples[step * args.prompts:(step + 1) * args.prompts]
        line = measure.training_step(policy, [policy.tokenizer.encode(e.problem) for e in part], "grpo", group_size=args.group_size,
                                     max_new_tokens=args.max_new_tokens, lr=1e-4, tokens_per_pass=10 ** 9, seed=step,
                                     golds=[e.answer for e in part])
        lines.append((line["total"], line["tokens"]))
    return lines


def trl(policy, examples: list[data.Example], args) -> list[tuple[float, int]]:
    """The same through GRPOTrainer; a step runs from its first token to the optimiser's step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    seconds, tokens, clock = [], [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            clock.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            seconds.append(time.perf_counter() - clock[-1])

    def reward(completions, completion_ids, answer, **_):
        tokens.append(sum(map(len, completion_ids)))
        return [float(is_correct(text, gold)) for text, gold in zip(completions, answer)]

    rows = args.prompts * args.group_size
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(output_dir=folder, use_cpu=True, bf16=False, per_device_train_batch_size=rows, num_generations=args.group_size,
                            max_completion_length=args.max_new_tokens, max_steps=args.steps, learning_rate=1e-4, lr_scheduler_type="constant",
                            weight_decay=0.0, beta=0.0, temperature=1.0, top_p=1.0, top_k=0, loss_type="grpo", shuffle_dataset=False,
                            activation_checkpointing=False, logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True)
        config.generation_kwargs = None if policy.is_lab else {"min_new_tokens": args.max_new_tokens}
        trainer = GRPOTrainer(copy.deepcopy(policy.model), reward, config, Dataset.from_list([{"prompt": e.problem, "answer": e.answer} for e in examples]),
                              processing_class=policy.tokenizer, callbacks=[Clock()])
        trainer.train()
    return list(zip(seconds, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="lab", help='"lab", a folder or a .gguf file')
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("--steps", type=int, default=6, help="per round, the first of which is a warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    try:
        import trl as package
    except ImportError:
        raise UserError("benchmarks.vs_trl needs TRL: pip install trl") from None
    policy = models.load(args.model, torch.device("cpu"))
    policy = policy if policy.is_lab else policy._replace(eos_ids=())
    examples, runs = load_problems(policy, args.prompts * args.steps), {"TRL": [], "oar": []}
    for _ in tqdm(range(args.rounds)):
        for name, run in (("TRL", trl), ("oar", ours)):
            with measure.PeakMemory() as peak:
                steps = run(policy, examples, args)
            runs[name] += [{"seconds": s, "tokens": n, "mib": peak.mib} for s, n in steps[1:]]
    table = {name: {"seconds": statistics.median(s["seconds"] for s in steps), "mib": statistics.median(s["mib"] for s in steps),
                    "tokens per second": sum(s["tokens"] for s in steps) / sum(s["seconds"] for s in steps)} for name, steps in runs.items()}
    print("| | s per step | completion tokens per s | peak MiB | speed against TRL |\n|---|---|---|---|---|")
    for name, row in table.items():
        print(f"| {name} | {row['seconds']:.2f} | {row['tokens per second']:.0f} | {row['mib']:.0f} | {table['TRL']['seconds'] / row['seconds']:.2f} |")
    print(f"medians of {args.rounds} x {args.steps - 1} steps; TRL {package.__version__}; {measure.machine()}")
    name = "lab" if policy.is_lab else "real"
    write_atomically(RESULTS / f"vs_trl_{name}.json", json.dumps({"machine": measure.machine(), "trl": package.__version__, "table": table}, indent=1) + "\n")


if __name__ == "__main__":
    exit_cleanly(main)
