"""Sample G completions per prompt with a small decode loop of our own.

1. Each prompt is read once; its cache is then shared out to the G samples.
2. Rows that have finished leave the batch, cache and all.
3. The sampler's log-probabilities and entropies are kept: entropy credit and the metrics need no extra forward.
4. One uniform number per (completion, position) is drawn *before* decoding and turned into a token by inverting the
   distribution's CDF.  A completion then depends on its prompt and its numbers only: batch size, padding and the
   other rows never change it, and the same numbers under two policies give paired samples.

No top-k, and top-p only for evaluation: in training the sampler and the loss must describe the same distribution.
"""
import torch

from oar.batch import Batch, decode, eval_mode, for_chunks, join, pad, position_ids
from oar.cache import growing_cache
from oar.models import Policy


def draw_uniforms(rows: int, max_new_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """The randomness of a rollout: (rows, max_new_tokens) float32 in [0, 1), drawn on the CPU."""
    return torch.rand(rows, max_new_tokens, generator=generator)


def invert_cdf(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulated probability passes the uniform number: (..., V), (...) -> (...)."""
    cdf = probs.cumsum(-1)
    tokens = (cdf <= uniforms[..., None] * cdf[..., -1:]).sum(-1)
    return torch.minimum(tokens, (cdf < cdf[..., -1:]).sum(-1))     # rounding must not reach past the last possible token


def pick_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float, top_p: float):
    """One token per row by inverse CDF: (R, V) logits, (R,) uniforms -> tokens (R,), log-probs (R,), entropy (R,).

    temperature 0 takes the most likely token.  Log-prob and entropy are of the tempered distribution (before top-p),
    in float32.
    """
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)               # (R, V)
    probs = logprobs.exp()
    entropy = -(probs * logprobs.clamp(min=-1e4)).sum(-1)
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        if top_p < 1:
            ranked, order = probs.sort(-1, descending=True)
            outside = ranked.cumsum(-1) - ranked >= top_p
            probs = probs.scatter(-1, order, ranked.masked_fill(outside, 0.0))
        tokens = invert_cdf(probs, uniforms)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0], entropy


def cut_at_stop(tokenizer, ids: list[int], stop_strings: list[str]) -> int | None:
    """Number of tokens to keep so that the text ends before the earliest stop string; None when none occurs."""
    text = decode(tokenizer, ids)
    starts = [text.find(stop) for stop in stop_strings if stop in text]
    if not starts:
        return None
    kept = len(ids)
    while kept and len(decode(tokenizer, ids[:kept])) > min(starts):
        kept -= 1
    return kept


@torch.no_grad()
def sample(policy: Policy, prompts: list[list[int]], group_size: int, max_new_tokens: int, uniforms: torch.Tensor,
           temperature: float = 1.0, top_p: float = 1.0, stop_strings: list[str] = (), progress=None) -> Batch:
    """Sample `group_size` completions of each prompt; row i of the batch answers prompts[i // group_size].

    uniforms (prompts * group_size, max_new_tokens) from `draw_uniforms`.  A completion ends with any of the policy's
    `eos_ids` (kept, in the mask) or before a stop string (cut away).  `progress` is called with the number of live rows after
    every token.
    """
    model, tokenizer = policy.model, policy.tokenizer
    device = model.device
    rows = len(prompts) * group_size
    ids, prompt_mask = pad(prompts, "left", tokenizer.pad_token_id, device)          # (N, P)
    uniforms, eos = uniforms.to(device), torch.tensor(policy.eos_ids, dtype=torch.long, device=device)
    tokens = torch.full((rows, max_new_tokens), tokenizer.pad_token_id, device=device)     # (B, T)
    logprobs, entropy = torch.zeros(2, rows, max_new_tokens, device=device)
    lengths = torch.full((rows,), max_new_tokens, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)

    with eval_mode(model):
        cache = growing_cache()
        logits = model(input_ids=ids, attention_mask=prompt_mask.long(), position_ids=position_ids(prompt_mask),
                       cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]  # (N, V)
        cache.batch_repeat_interleave(group_size)
        logits = logits.repeat_interleave(group_size, 0)                             # (B, V)
        mask = prompt_mask.repeat_interleave(group_size, 0)                          # (B, P)
        live = torch.arange(rows, device=device)
        for t in range(max_new_tokens):
            picked, logp, ent = pick_tokens(logits, uniforms[live, t], temperature, top_p)
            tokens[live, t], logprobs[live, t], entropy[live, t] = picked, logp, ent
            done = torch.isin(picked, eos)
            if stop_strings:
                recent = tokenizer.batch_decode(tokens[live, max(0, t - 15):t + 1], skip_special_tokens=True)
                done |= torch.tensor([any(s in text for s in stop_strings) for text in recent], device=device)
            lengths[live[done]], finished[live[done]] = t + 1, True
            if progress:
                progress(int((~done).sum()))
            if done.all() or t == max_new_tokens - 1:
                break
            if done.any():
                keep = (~done).nonzero()[:, 0]
                cache.batch_select_indices(keep)
                live, mask, picked = live[keep], mask[keep], picked[keep]
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], 1)
            logits = model(input_ids=picked[:, None], attention_mask=mask.long(), cache=cache, use_cache=True,
                           position_ids=position_ids(mask)[:, -1:], logits_to_keep=1).logits[:, -1]

    if stop_strings:
        for row in range(rows):
            cut = cut_at_stop(tokenizer, tokens[row, :lengths[row]].tolist(), stop_strings)
            lengths[row] = lengths[row] if cut is None else cut
    width = max(1, int(lengths.max()))
    completion_mask = torch.arange(width, device=device) < lengths[:, None]          # (B, T)
    tokens = tokens[:, :width].masked_fill(~completion_mask, tokenizer.pad_token_id)
    texts = [decode(tokenizer, row[m].tolist()) for row, m in zip(tokens, completion_mask)]
    return Batch(ids.repeat_interleave(group_size, 0), prompt_mask.repeat_interleave(group_size, 0), tokens,
                 completion_mask, logprobs[:, :width] * completion_mask, entropy[:, :width] * completion_mask,
                 finished, texts)


def sample_in_parts(policy: Policy, prompts: list[list[int]], group_size: int, max_new_tokens: int, uniforms: torch.Tensor,
                    *settings, **more) -> Batch:
    """`sample`, half the completions at a time when memory runs out: each has the numbers it would have had, and so its text."""
    parts, order, rows_in_all = [], [], len(prompts) * group_size

    def run(rows: list[int]) -> None:
        whole = len(rows) == rows_in_all
        some = prompts if whole else [prompts[row // group_size] for row in rows]
        parts.append(sample(policy, some, group_size if whole else 1, max_new_tokens, uniforms[rows], *settings, **more))
        order.extend(rows)

    for_chunks([1] * rows_in_all, rows_in_all, run)
    return parts[0] if len(parts) == 1 else join(parts, order, policy.tokenizer.pad_token_id)
