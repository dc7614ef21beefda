"""OAR inside TRL: a GRPOTrainer whose advantages are per token (optional: pip install trl).

    from oar.trl import OARConfig, OARTrainer        # was: from trl import GRPOConfig, GRPOTrainer

TRL samples, rewards and normalises as ever; then its advantages (B,) become token advantages (B, T) by the functions that
train.py uses (`credit.assign_credit`), and TRL's own loss takes them.  Nothing else is overridden.

1. `--method grpo` returns TRL's advantages untouched: its loss and its step, to the bit.
2. Attribution reads the training model, so it does not matter what sampled (generate, vLLM).  It runs once per rollout:
   slices for gradient accumulation and several iterations per rollout carry their token advantages with them.
3. It runs in the trainer's mixed precision, except OAR-G, which needs float32 (gradnoise.py); `scoring_model` takes
   off the autocast that accelerate puts around the model's forward.
4. PEFT models are scored with their adapters.  Tokens that a tool wrote are read, not weighted.
5. DDP and ZeRO-1/2 keep whole weights on every process.  FSDP2 and ZeRO-3 do not, and processes attribute different
   numbers of completions: the weights are gathered for the attribution, as they are for sampling.
6. With `importance_sampling_level="sequence"` one ratio multiplies the sum of w_t A over the completion, in which the
   weights cancel: refused, since it would be GSPO at a higher price.
"""
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule

try:
    from trl import GRPOConfig, GRPOTrainer
    from trl.models.utils import unwrap_model_for_generation
except ImportError as error:
    raise ImportError(f"oar.trl needs TRL 1.16 or later: pip install trl ({error})") from None

from oar import lab, metrics
from oar.batch import Batch, decode, random_stream
from oar.credit import Credit, CreditConfig, assign_credit, check_credit
from oar.errors import UserError
from oar.flags import flag
from oar.models import Policy

ADDITIVE = ("entropy_bonus", "ktae")     # methods that shift advantages instead of spreading them


@dataclass
class OARConfig(CreditConfig, GRPOConfig):
    """TRL's GRPOConfig and the settings of oar/credit.py (method, probe, gate, ...)."""
    tokens_per_pass: int = flag(8192, "Tokens per forward in attribution: memory only, never the result.")

    def __post_init__(self):
        super().__post_init__()
        check_credit(self)
        rows = self.per_device_train_batch_size * self.steps_per_generation
        if self.method == "roles":
            raise UserError("--method roles: token roles are known in the lab's own training (train.py) only")
        if self.method == "ktae" and rows % self.num_generations:
            raise UserError(f"--method ktae compares the completions of one prompt, but the {rows} rows that a process samples "
                            f"do not hold whole groups of {self.num_generations}")
        if self.importance_sampling_level == "sequence" and self.renormalise and self.method not in ("grpo", *ADDITIVE):
            raise UserError(f"--method {self.method}: with importance_sampling_level sequence the token weights cancel, since "
                            "they sum to the number of tokens; use importance_sampling_level token")


class OARTrainer(GRPOTrainer):
    """GRPOTrainer with token-level credit."""
    _tag_names = [*GRPOTrainer._tag_names, "oar"]

    def __init__(self, model, reward_funcs=None, args: OARConfig | None = None, **others):
        args = OARConfig() if args is None else args
        if not isinstance(args, OARConfig):
            raise UserError(f"OARTrainer takes an OARConfig, not a {type(args).__name__}")
        super().__init__(model, reward_funcs, args, **others)
        check_model(self)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.model.training and self.args.method != "grpo":
            credit = token_credit(self, output)
            scored, mask = credit.reasoning_mask & (output["advantages"] != 0)[:, None], output["completion_mask"].bool()
            self._metrics["train"]["oar/ess_ratio"].append(metrics.ess_ratio(credit.weights, scored))
            self._metrics["train"]["oar/top10_mass"].append(metrics.top_mass(credit.token_advantages, mask))
            output["advantages"] = credit.token_advantages                           # (B,) -> (B, T)
        return output


def token_credit(trainer: OARTrainer, output: dict) -> Credit:
    """Credit of the completions that TRL has just sampled on this process."""
    args, advantages = trainer.args, output["advantages"]
    if "pixel_values" in output:
        raise UserError("OARTrainer scores prompts of text only, and these hold images")
    batch = batch_of(trainer, output)
    generator = random_stream(args.seed, trainer._step, trainer.accelerator.process_index, "attribution")
    own = output["tool_mask"].bool() if "tool_mask" in output else None
    with trainer.accelerator.autocast(), scoring_model(trainer) as model:
        policy = Policy(model, trainer._tokenizer, tuple(trainer.eos_token_ids), lab.is_lab(trainer._tokenizer))
        # rewards serve KTAE only, to tell right from wrong inside a group: advantages order a group in the same way
        return assign_credit(policy, batch, advantages, advantages, args, trainer.num_generations, args.temperature, generator,
                             args.tokens_per_pass, own=own)


def batch_of(trainer: OARTrainer, output: dict) -> Batch:
    """TRL's rollout as a Batch. Sampling entropies cost a forward and are computed for the methods that read them."""
    ids, mask = output["completion_ids"], output["completion_mask"].bool()           # (B, T)
    entropy = torch.zeros(mask.shape, device=ids.device)
    if trainer.args.method in ("entropy", "entropy_bonus"):
        whole, attended = (torch.cat([output[f"prompt_{x}"], output[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        with torch.no_grad():
            _, entropy, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, whole, attended, ids.shape[1], trainer.args.per_device_train_batch_size, compute_entropy=True)
    eos = torch.tensor(trainer.eos_token_ids, device=ids.device)
    texts = [decode(trainer._tokenizer, row[m].tolist()) for row, m in zip(ids, mask)]
    return Batch(output["prompt_ids"], output["prompt_mask"].bool(), ids, mask, torch.zeros(mask.shape, device=ids.device),
                 entropy.float() * mask, (torch.isin(ids, eos) & mask).any(1), texts)


# --------------------------------------------------------------------------------------------------------------------
# the model behind TRL's wrappings

def check_model(trainer: OARTrainer) -> None:
    """UserError for a model that the chosen method cannot score."""
    method, model, plugin = trainer.args.method, trainer.model, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if method in ("grpo", "random", "entropy", *ADDITIVE):
        return                                       # no attribution
    if hasattr(model, "peft_config") and any(c.is_prompt_learning for c in model.peft_config.values()):
        raise UserError(f"--method {method} cannot score prompt-learning adapters; LoRA and its relatives work")
    if plugin is not None and plugin.fsdp_version != 2:
        raise UserError(f"--method {method} needs FSDP2: set fsdp_version to 2 in accelerate's configuration")
    if method == "oar_g":
        if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
            raise UserError("--method oar_g scores in float32, which a quantised model cannot do; oar_f and oar_p can")
        if plugin is not None and trainer.accelerator.mixed_precision != "no":
            raise UserError("--method oar_g scores in float32, which FSDP2 in mixed precision cannot do; oar_f and oar_p can")


@contextmanager
def scoring_model(trainer: OARTrainer):
    """The plain model, adapters included, with whole weights and without accelerate's autocast around its forward."""
    kwargs = {"gradient_checkpointing_kwargs": trainer.args.gradient_checkpointing_kwargs}
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator, **kwargs) as model, unsharded(model):
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        forward, plain = model.__dict__.get("forward"), model.__dict__.get("_original_forward")
        try:
            if plain is not None:
                model.forward = plain
            yield model
        finally:
            if plain is not None:
                model.forward = forward


@contextmanager
def unsharded(model):
    """Gather what FSDP2 has sharded and keep it: processes run different numbers of forwards, so none may wait for another."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
        module.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for module in sharded:
            module.set_reshard_after_forward(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)
            module.reshard()
