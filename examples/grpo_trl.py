"""GRPO with token-level credit on TRL's engine: GSM8K from the hub, or a JSONL file.

    python examples/grpo_trl.py --model Qwen/Qwen2.5-Math-1.5B                                   # one GPU
    accelerate launch --multi_gpu --num_processes 8 examples/grpo_trl.py --model Qwen/Qwen2.5-Math-1.5B    # eight GPUs
    python examples/grpo_trl.py --model Qwen/Qwen2.5-Math-1.5B --lora_rank 16 --learning_rate 1e-5      # LoRA
    python examples/grpo_trl.py --model PATH.gguf --data words.jsonl --use_cpu --max_completion_length 32 --max_steps 2

Every field of OARConfig, and so of TRL's GRPOConfig, is a flag: --method oar_p, --use_vllm, --num_iterations 2, ...
For two processes on a CPU put `accelerate launch --multi_gpu --num_processes 2` before the last command's script.
"""
import sys
from dataclasses import dataclass

import torch
from datasets import Dataset
from transformers import HfArgumentParser

from oar import data, models
from oar.errors import exit_cleanly
from oar.flags import flag, parse_flags
from oar.trl import OARConfig, OARTrainer
from oar.verify import is_correct


@dataclass
class Script:
    model: str = flag("Qwen/Qwen2.5-Math-1.5B", "A hub id, a local folder or a .gguf file.")
    data: str = flag("gsm8k", "gsm8k (its training problems) or a JSONL file with problem and answer.")
    lora_rank: int = flag(0, "Train LoRA adapters of this rank instead of all weights (needs peft).")


def answer_is_right(completions, gold, **_) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(is_correct(text, accepted)) for text, accepted in zip(texts, gold)]


def main() -> None:
    parser = HfArgumentParser((Script, OARConfig), description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.set_defaults(output_dir="runs/trl", bf16=torch.cuda.is_available(), report_to="none", logging_steps=1)
    script, args = parse_flags(parser, sys.argv[1:])
    policy = models.load(script.model, torch.device("cpu"))                  # the trainer moves it
    examples = (data.read_hub("openai/gsm8k", "train", "question", "answer", "main") if script.data == "gsm8k"
                else data.read_jsonl(script.data))
    golds = [e.answer if isinstance(e.answer, list) else [e.answer] for e in examples]
    rows = [{"prompt": data.prompt(policy, e.problem), "gold": gold} for e, gold in zip(examples, golds)]
    adapter = None
    if script.lora_rank:
        from peft import LoraConfig
        adapter = LoraConfig(r=script.lora_rank, lora_alpha=2 * script.lora_rank, target_modules="all-linear")
    trainer = OARTrainer(policy.model, answer_is_right, args, train_dataset=Dataset.from_list(rows),
                         processing_class=policy.tokenizer, peft_config=adapter)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    exit_cleanly(main)
