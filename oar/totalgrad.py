"""oar_tg: the total effect by gradients, two backward passes instead of L forwards (ours).

For a chain of thought, first order.  With lo(u) the log-odds of the token written at u, log p - log(1 - p), and e'_t the
*expected other embedding* at t, sum over v != own of p(v) e_v / (1 - p(own)):

    g[t,u] = dlo(u)/de_t . (e_t - e'_t)                 what token u would lose if t were another plausible token
    d[t]^2 = sum over answer tokens a of g[t,a]^2                                           direct
    m[t]^2 = sum over later tokens u of  d[u] p(u)^2 g[t,u]^2       (d scaled to sum 1)     through mediators
    I(t)   = d[t] / sum d + m[t] / sum m

1. A sum of squares needs no pass per term: with random signs s, E (sum_u s_u x_u)^2 = sum_u x_u^2, so one backward of the
   signed sum estimates it, all rows at once.  `draws` sign patterns are averaged; one works.
2. e_t - e'_t is what makes it work.  Gradient x Input compares a token with the zero embedding, which favours tokens
   with a large embedding, the fixed form; this difference is the first-order term of "replace t by another token".
3. Log-odds, since the gradient of a probability near 1 vanishes; the weight p(u) leaves out tokens that could as
   well have been others (fillers).  The weight d[u] lets credit flow only through tokens that matter to the answer.
4. The output head is differentiated on a bounded number of positions at a time, then once through the body: no
   (length, V) tensor is kept.  Parameters and their `.grad` stay out of it, as in gradnoise.py.
"""
import torch

from oar.batch import eval_mode, for_chunks
from oar.gradnoise import input_embeddings, no_autocast
from oar.probe import LOGIT_FLOOR, Probe, forced_targets
from oar.total import head, positions_at_once, take


def oar_tg(model, probe: Probe, draws: int, generator: torch.Generator, token_budget: int) -> torch.Tensor:
    """Importance (B, S) float32 >= 0 from `draws` sign patterns of `generator` (on the CPU)."""
    importance = torch.zeros(probe.reasoning_mask.shape, device=probe.ids.device)    # (B, S)
    seeds = torch.randint(2 ** 62, (len(importance),), generator=generator).tolist()

    def score_rows(rows: list[int]) -> None:
        importance[rows] = _score(model, probe.rows(rows), draws, [seeds[row] for row in rows])

    with eval_mode(model):
        for_chunks([probe.ids.shape[1]] * len(importance), token_budget, score_rows)
    return importance


def _score(model, probe: Probe, draws: int, seeds: list[int]) -> torch.Tensor:
    mask, width = probe.reasoning_mask, probe.prompt_width
    embeds = input_embeddings(model, probe.ids).requires_grad_(True)                     # (R, L, H)
    hidden = model.base_model(inputs_embeds=embeds, attention_mask=probe.mask.long(), position_ids=probe.position_ids,
                              use_cache=False).last_hidden_state                     # (R, L, H)
    with torch.no_grad():
        probe = forced_targets(probe, head(model, take(hidden, probe.positions)))
    columns = width - 1 + torch.arange(mask.shape[1], device=mask.device).expand_as(mask)    # the state before each token
    slope, p, other = log_odds_slopes(model, hidden.detach(), columns, probe.ids[:, width:], mask)
    answer_slope, _, _ = log_odds_slopes(model, hidden.detach(), probe.positions, probe.targets, probe.position_mask)
    difference = torch.where(mask[..., None], embeds.detach()[:, width:].float() - other, 0.0)       # (R, S, H)

    def effect(at: torch.Tensor, slopes: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """sqrt(mean over draws of (signed sum of slopes, pulled back to the embeddings, . difference)^2): (R, S)."""
        squares = torch.zeros(mask.shape, device=mask.device)
        for signs in random_signs(seeds, draws, wanted):
            signed = slopes * signs[..., None]                                       # (R, U, H)
            pulled = torch.zeros_like(hidden).scatter_add_(1, at[..., None].expand_as(signed), signed.to(hidden.dtype))
            with no_autocast(probe):
                gradient, = torch.autograd.grad(hidden, embeds, pulled, retain_graph=True)
            squares += (gradient[:, width:].float() * difference).sum(-1).square()
        return (squares / draws).sqrt()

    direct = share(effect(probe.positions, answer_slope, probe.position_mask))
    mediators = slope * (direct.sqrt() * p)[..., None]
    return direct + share(effect(columns, mediators, mask))


def log_odds_slopes(model, hidden: torch.Tensor, columns: torch.Tensor, tokens: torch.Tensor,
                    wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For tokens (R, U) predicted by the states at `columns`: d log-odds / d state (R, U, H), the token's probability
    (R, U), and the expected other embedding there (R, U, H); 0 where not `wanted`."""
    states, own = take(hidden, columns)[wanted], tokens[wanted]                      # (M, H), (M,)
    table, parts = model.get_input_embeddings().weight.detach().float(), []
    for h, token in zip(states.split(positions_at_once(model)), own.split(positions_at_once(model))):
        h = h.detach().requires_grad_(True)
        logits = head(model, h).float().clamp(min=LOGIT_FLOOR)                       # (M', V)
        others = logits.scatter(1, token[:, None], -torch.inf)
        odds = logits.gather(1, token[:, None])[:, 0] - others.logsumexp(1)
        with torch.autocast(h.device.type, enabled=False):
            slope, = torch.autograd.grad(odds.sum(), h)
            parts.append((slope.float(), odds.detach().sigmoid(), others.detach().softmax(1) @ table))
    return tuple(scatter(torch.cat(values), wanted) for values in zip(*parts))


def scatter(values: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Values (M, ...) at the True places of wanted (R, U), 0 elsewhere: (R, U, ...)."""
    full = values.new_zeros(*wanted.shape, *values.shape[1:])
    full[wanted] = values
    return full


def random_signs(seeds: list[int], draws: int, wanted: torch.Tensor) -> torch.Tensor:
    """+1 or -1 where wanted (R, U) is True, else 0: (draws, R, U).  A row's signs depend on its own seed and length only."""
    signs = torch.zeros(draws, *wanted.shape)
    for row, (seed, length) in enumerate(zip(seeds, wanted.sum(1).tolist())):
        generator = torch.Generator().manual_seed(seed)
        signs[:, row, :length] = torch.randint(0, 2, (draws, length), generator=generator) * 2.0 - 1
    return signs.to(wanted.device)


def share(scores: torch.Tensor) -> torch.Tensor:
    """Rows scaled to sum 1 (all-zero rows stay 0)."""
    return scores / scores.sum(1, keepdim=True).clamp(min=1e-30)
