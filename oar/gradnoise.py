"""OAR-G and the Fisher score: importance from one backward pass to the input embeddings (paper section 4.2).

OAR-G adds Gaussian noise (std 1e-3) to the embeddings e_t of the reasoning tokens and reads Gradient x Input:

    J = divergence(outcome(e), outcome(e + noise)),      s_t = | sum_h dJ/de_th * e_th |

Two things to know.  (1) J has its minimum at zero noise, so dJ/de = F noise to first order, F the Fisher information of
the probe with respect to the embeddings: one draw is a random projection, and averaging s over draws helps.  (2) In
bfloat16 a noise of 1e-3 is partly rounded away and the two outcomes can coincide, so OAR-G always scores in float32
(a bfloat16 model is scored through a float32 copy of its weights).

The Fisher score (ours) drops the noise.  With y sampled from the clean outcome p,

    s_t^2 = E_y[ ( d log p(y) / de_t . e_t )^2 ]

is the second-order Taylor term of OAR-P with "mask = zero embedding", KL ~ 1/2 e_t' F_tt e_t: it links P and G.  It takes
first-order gradients of a quantity that is not near its minimum, so it is sound in bfloat16.

Gradients are taken by `autograd.grad` with respect to the embedding output only: parameters, their `.grad` and (with
tied embeddings) the output head's share stay out of it.
"""
from functools import partial

import torch
from torch.func import functional_call
from transformers import DynamicCache

from oar.batch import eval_mode, for_chunks, position_ids
from oar.probe import Probe, divergence, forced_targets, outcome
from oar.rollout import invert_cdf


def input_embeddings(model, ids: torch.Tensor) -> torch.Tensor:
    """Embeddings of token ids, (R, L, H), detached from the model's parameters."""
    return model.get_input_embeddings()(ids).detach()


def gradient_x_input(gradient: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    """sum_h gradient * embedding, (R, L, H) twice -> (R, L) float32."""
    return (gradient.float() * embeds.float()).sum(-1)


def in_float32(model, **inputs):
    """The model's output with float32 weights whatever its dtype (float32 weights are used as they are)."""
    weights = {name: p.detach().float() for name, p in model.named_parameters()}
    return functional_call(model, weights, kwargs=inputs)


@torch.no_grad()
def read_prompts(forward, probe: Probe) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every prompt column but the last, per layer (R, heads, P-1, d).

    Nothing is disturbed there and nothing differentiated, so each distinct prompt is read once for all its completions.
    """
    end = probe.prompt_width - 1
    if end == 0:
        return []
    prompts = torch.stack([probe.ids[:, :end], probe.mask[:, :end].long()], 1)       # (R, 2, P-1)
    prompts, prompt_of = prompts.unique(dim=0, return_inverse=True)
    ids, mask = prompts.unbind(1)
    out = forward(input_ids=ids, attention_mask=mask, position_ids=position_ids(mask), cache=DynamicCache(), use_cache=True,
                  logits_to_keep=1)
    return [(layer.keys[prompt_of], layer.values[prompt_of]) for layer in out.cache.layers]


def behind_prompt(forward, probe: Probe, prompts: list, embeds: torch.Tensor) -> torch.Tensor:
    """Probe logits (R, K, V) for embeddings (R, 1+S, H) of the last prompt token and the completion."""
    begin = probe.prompt_width - 1
    return forward(inputs_embeds=embeds, attention_mask=probe.mask.long(), position_ids=probe.position_ids[:, begin:],
                   cache=DynamicCache(prompts), use_cache=True, logits_to_keep=probe.positions - begin).logits


def oar_g(model, probe: Probe, noise_std: float, draws: int, generator: torch.Generator, token_budget: int) -> torch.Tensor:
    """OAR-G, averaged over `draws` noise draws from `generator` (on the CPU): importance (B, S) float32 >= 0.

    A batch costs one forward, and one forward and backward per draw; rows are independent, so the sum of their J has
    each row's own gradient.
    """
    importance = torch.zeros(probe.reasoning_mask.shape, device=probe.ids.device)    # (B, S)
    seeds = torch.randint(2 ** 62, (len(importance), draws), generator=generator).tolist()
    forward = partial(in_float32, model)

    def score_rows(rows: list[int]) -> None:
        part = probe.rows(rows)
        prompts = read_prompts(forward, part)
        embeds = input_embeddings(model, part.ids[:, part.prompt_width - 1:]).float()            # (R, 1+S, H)
        with torch.no_grad():
            logits = behind_prompt(forward, part, prompts, embeds)
        part = forced_targets(part, logits)
        clean, scores = outcome(logits, part), torch.zeros(part.reasoning_mask.shape, device=embeds.device)
        for draw in range(draws):
            noise = noise_std * row_noise([seeds[row][draw] for row in rows], part.reasoning_mask, embeds.shape[-1])
            noisy = embeds.clone()
            noisy[:, 1:] += noise
            noisy.requires_grad_(True)
            moved = divergence(clean, outcome(behind_prompt(forward, part, prompts, noisy), part), part.kind).sum()
            gradient, = torch.autograd.grad(moved, noisy)
            scores += gradient_x_input(gradient, embeds)[:, 1:].abs()
        importance[rows] = torch.where(part.reasoning_mask, scores / draws, 0.0)

    with eval_mode(model), no_autocast(probe):
        for_chunks([probe.ids.shape[1]] * len(importance), token_budget, score_rows)
    return importance


def no_autocast(probe: Probe):
    """Forward and backward in the tensors' own dtypes. (A backward pass inside autocast would round its products.)"""
    return torch.autocast(probe.ids.device.type, enabled=False)


def row_noise(seeds: list[int], mask: torch.Tensor, hidden: int) -> torch.Tensor:
    """Standard normal noise where mask (R, S) is True, (R, S, hidden): a row's noise depends on its own seed only."""
    noise = torch.zeros(*mask.shape, hidden)
    for row, (seed, length) in enumerate(zip(seeds, mask.sum(1).tolist())):
        noise[row, :length] = torch.randn(length, hidden, generator=torch.Generator().manual_seed(seed))
    return noise.to(mask.device)


def sample_loglik(logits: torch.Tensor, probe: Probe, uniforms: torch.Tensor) -> torch.Tensor:
    """log p(y) with y drawn from the outcome itself: logits (R, K, V), uniforms (R, K) -> (R,).

    `last` and `answer_mean` draw one token from the probed distribution; `answer_joint` draws one token per answer
    position and takes the mean of their log-probabilities, as phi does.
    """
    if probe.kind == "answer_joint":
        mask = probe.position_mask
        logprobs = logits.float().log_softmax(-1)                                    # (R, K, V)
    else:
        mask = torch.ones_like(probe.position_mask[:, :1])
        logprobs = outcome(logits, probe)[:, None]                                   # (R, 1, V)
    draw = invert_cdf(logprobs.detach().exp(), uniforms[:, :logprobs.shape[1]])      # (R, K or 1)
    return (logprobs.gather(-1, draw[..., None])[..., 0] * mask).sum(1) / mask.sum(1)


def oar_f(model, probe: Probe, samples: int, generator: torch.Generator, token_budget: int) -> torch.Tensor:
    """The Fisher score from `samples` outcomes per completion: importance (B, S) float32 >= 0.

    One forward, and one backward per sample, all rows at once.
    """
    importance = torch.zeros(probe.reasoning_mask.shape, device=probe.ids.device)    # (B, S)
    uniforms = torch.rand(samples, *probe.positions.shape, generator=generator).to(importance.device)   # (m, B, K)

    def score_rows(rows: list[int]) -> None:
        part = probe.rows(rows)
        embeds = input_embeddings(model, part.ids[:, part.prompt_width - 1:]).requires_grad_(True)   # (R, 1+S, H)
        logits = behind_prompt(model, part, read_prompts(model, part), embeds)       # (R, K, V)
        squares = torch.zeros(part.reasoning_mask.shape, device=embeds.device)
        for draw in uniforms[:, rows]:
            loglik = sample_loglik(logits, part, draw).sum()
            with no_autocast(probe):
                gradient, = torch.autograd.grad(loglik, embeds, retain_graph=True)
            squares += gradient_x_input(gradient, embeds.detach())[:, 1:].square()
        importance[rows] = torch.where(part.reasoning_mask, (squares / samples).sqrt(), 0.0)

    with eval_mode(model):
        for_chunks([probe.ids.shape[1]] * len(importance), token_budget, score_rows)
    return importance
