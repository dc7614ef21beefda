"""Run by test_trl.py under accelerate: two steps of the fixed rollout, then the weights to a file."""
import sys

import torch
from test_trl import make_trainer

if __name__ == "__main__":
    method, rows, out = sys.argv[1:]
    trainer = make_trainer("unused", method=method, per_device_train_batch_size=int(rows), loss_type="grpo")
    trainer.train()
    if trainer.accelerator.is_main_process:
        torch.save(trainer.model.state_dict(), out)
