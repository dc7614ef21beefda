"""Run by test_trl.py in two processes: attribution of a model sharded by FSDP2, with different work on each of them."""
import copy

import torch
import torch.distributed as dist
from conftest import EOS_ID, make_batch, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from oar import lab
from oar.batch import random_stream
from oar.credit import CreditConfig, assign_credit
from oar.models import Policy
from oar.trl import unsharded


def credit(model, method, rows):
    tokenizer = lab.build_tokenizer()
    prompts = [tokenizer.encode("x 3 y 5 ; x + 4 ?")] * 3
    batch = make_batch(prompts, [tokenizer.encode(f"so x : 3 + 4 = {digit} ; #### {digit} 5") for digit in (7, 8, 9)], tokenizer)
    advantages = torch.tensor([1.0, -0.5, -0.5]) * (torch.arange(3) < rows)
    return assign_credit(Policy(model, tokenizer, (EOS_ID,), True), batch, advantages, advantages, CreditConfig(method=method), 3, 1.0,
                         random_stream("sharded"), 64).token_advantages


if __name__ == "__main__":
    dist.init_process_group("gloo")
    whole = tiny_model("llama")
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (2,))
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=mesh)
    rows = 3 if dist.get_rank() == 0 else 0
    for method in ("oar_p", "oar_f", "oar_g", "oar_t", "oar_tg"):
        with unsharded(model):
            found = credit(model, method, rows)
        assert torch.allclose(found, credit(whole, method, rows), atol=1e-4), method
    assert all(isinstance(p, DTensor) for p in model.parameters())                   # sharded again
    ids = torch.arange(6, 18)[None]
    assert torch.allclose(model(input_ids=ids).logits, whole(input_ids=ids).logits, atol=1e-5)
    dist.destroy_process_group()
