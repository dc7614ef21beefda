"""How noisy a step's gradient is: its variance, its agreement with a large batch, and the part that nuisance tokens carry.

The gradient of a step is linear in the token advantages, g = - sum_t c_t A_t d log p_t / d theta, so it splits into what
different tokens contribute.  From S steps' gradients g_s of one policy, with m_s the mean of the *other* S - 1:

    variance    trace of the covariance of g_s, sum |g_s - mean|^2 / (S - 1)
    signal      |expected gradient|^2, estimated by |mean|^2 - variance / S (can be negative: the signal is lost in noise)
    cosine_s    cos(g_s, m_s): a mini-batch against a large batch that does not hold it

All of these are functions of the inner products g_s . g_r, so only that (S, S) table is kept.  Gradients are the raw ones:
AdamW rescales them per parameter, which changes lengths but is the same for every method at a given policy.
"""
import torch

from oar import grpo
from oar.batch import Batch, chunks_by_budget, eval_mode


def step_gradient(model, batch: Batch, token_advantages: torch.Tensor, coefficients: torch.Tensor, temperature: float = 1.0,
                  token_budget: int = 32768) -> torch.Tensor:
    """Flat gradient (parameters,) float32 of the surrogate at ratio 1; parameters' `.grad` stays untouched.

    token_advantages and coefficients (B, T) as in `grpo.update`; rows without any advantage are left out.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    rows = (token_advantages != 0).any(1).nonzero()[:, 0].tolist()
    lengths = (batch.prompt_mask.sum(1) + batch.completion_mask.sum(1))[rows].tolist()
    with eval_mode(model):
        for chunk in chunks_by_budget(lengths, token_budget):
            at = [rows[i] for i in chunk]
            part = batch.rows(at)
            t = part.completion_ids.shape[1]
            logprobs = grpo.completion_logprobs(model, part, temperature)                        # (R, t)
            loss = grpo.policy_loss(logprobs, logprobs.detach(), token_advantages[at, :t], coefficients[at, :t])
            total += torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]).float()
    return total


def inner_products(gradients: torch.Tensor, others: torch.Tensor | None = None) -> torch.Tensor:
    """g_s . h_r: (S, parameters) and, if given, `others` of the same shape -> (S, S) float64."""
    return (gradients @ (gradients if others is None else others).T).double()


def variance(products: torch.Tensor) -> float:
    """Trace of the gradients' covariance (unbiased) from their inner products (S, S), S >= 2."""
    count = len(products)
    return ((products.diagonal().sum() - products.sum() / count) / (count - 1)).item()


def signal(products: torch.Tensor) -> float:
    """Squared length of the expected gradient, the noise of the mean taken out: the mean product of two different steps."""
    count = len(products)
    return ((products.sum() - products.diagonal().sum()) / (count * (count - 1))).item()


def cosines(own: torch.Tensor, cross: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """cos(g_s, mean of h_r over r != s), (S,).

    own: g_s . g_r, cross: g_s . h_r, reference: h_s . h_r, all (S, S).  With h = g it is the agreement of a step with a
    large batch of its own method; with h the plain GRPO gradients, with the large-batch policy gradient.  0 where a
    gradient is 0.
    """
    others = 1 - torch.eye(len(own), dtype=own.dtype)                                # row s: every step but s
    dot = (cross * others).sum(1)
    length = (others @ reference @ others).diagonal().clamp(min=0).sqrt()
    scale = own.diagonal().clamp(min=0).sqrt() * length
    return torch.where(scale > 0, dot / scale.clamp(min=1e-300), 0.0)
