"""OAR-P: importance by perturbation (paper section 4.2).

    s_t = divergence(outcome(clean), outcome(reasoning token t replaced))         for every reasoning token t

`edits` says what token t is replaced by: the mask token (`mask_edits`; the pad token, attended to, as the paper masks), or
an in-distribution edit (`resample_edits`): a sample from the policy's own next-token distribution at that place, or its
best other token (temperature 0).

KL scores are clamped at 0 (rounding).  `answer_joint` scores can be negative: replacing the token made the answer
*likelier*.  They are clamped at 0 too, since such a token does not support the answer and earns no credit for it.
"""
from typing import NamedTuple

import torch
from transformers import DynamicCache

from oar.batch import eval_mode, for_chunks
from oar.cache import prefix_cache
from oar.probe import LOGIT_FLOOR, Probe, divergence, forced_targets, outcome, probe_logits
from oar.rollout import pick_tokens

EDIT_LOGITS = 2 ** 28     # numbers (1 GiB in float32): positions x V whose edits are drawn together
ENOUGH = 8     # disturbed sequences that keep a device busy


# --------------------------------------------------------------------------------------------------------------------
# the definition: one disturbed sequence per forward

@torch.no_grad()
def oar_p_serial(model, probe: Probe, edits: torch.Tensor) -> torch.Tensor:
    """OAR-P as the paper defines it, one forward per reasoning token: the oracle of `oar_p` in the tests.

    edits (B, S) token ids -> importance (B, S) float32 >= 0, 0 outside the reasoning.
    """
    importance = torch.zeros(probe.reasoning_mask.shape, device=probe.ids.device)    # (B, S)
    with eval_mode(model):
        for row in range(len(importance)):
            one = probe.rows([row])
            logits = probe_logits(model, one)                                        # (1, K, V)
            one = forced_targets(one, logits)
            clean = outcome(logits, one)
            for t in one.reasoning_mask[0].nonzero()[:, 0].tolist():
                ids = one.ids.clone()
                ids[0, one.prompt_width + t] = edits[row, t]
                disturbed = outcome(probe_logits(model, one, input_ids=ids), one)
                importance[row, t] = divergence(clean, disturbed, one.kind)[0]
    return importance.clamp(min=0)


# --------------------------------------------------------------------------------------------------------------------
# the same numbers, fast

@torch.no_grad()
def oar_p(model, probe: Probe, edits: torch.Tensor, token_budget: int) -> torch.Tensor:
    """OAR-P, batched: the numbers of `oar_p_serial` for a fraction of the work.

    1. Editing token t changes nothing before t.  The clean sequence is read once, its keys and values are kept, and a
       disturbed sequence runs only its suffix behind the clean prefix.
    2. Completions start in the same column, so one column of all completions goes in one forward, a suffix each and no
       padding between them (few completions: a block of columns, whose suffixes begin with the block's first).
    3. Logits are computed at the probe positions only.
    4. A forward holds at most `token_budget` tokens, prefix included.  When the device runs out of memory that is
       halved and the work goes on; the numbers do not depend on it.
    """
    importance = torch.zeros(probe.reasoning_mask.shape, device=probe.ids.device)    # (B, S)

    def score_rows(rows: list[int]) -> None:
        part = probe.rows(rows)
        out = model(input_ids=part.ids, attention_mask=part.mask.long(), position_ids=part.position_ids,
                    cache=DynamicCache(), use_cache=True, logits_to_keep=part.positions)
        part = forced_targets(part, out.logits)
        clean, scores = outcome(out.logits, part), torch.zeros(part.reasoning_mask.shape, device=part.ids.device)

        def read(suffixes: Suffixes) -> None:
            at = suffixes.rows
            logits = model(**suffixes.inputs, logits_to_keep=suffixes.positions).logits                      # (N, K, V)
            scores[at, suffixes.tokens] = divergence(clean[at], outcome(logits, part.rows(at)), part.kind)

        for_suffixes(part, edits[rows], out.cache, token_budget, read)
        importance[rows] = scores

    with eval_mode(model):
        for_chunks([probe.ids.shape[1]] * len(importance), token_budget, score_rows)
    return importance.clamp(min=0)


class Suffixes(NamedTuple):
    """N disturbed sequences that share the clean prefix up to completion column `start`, ready to run."""
    rows: list[int]              # whose sequence it is
    tokens: list[int]            # which of its tokens is replaced
    start: int
    inputs: dict                 # keyword arguments of the model: suffix ids (N, L'), masks, a copy of the prefix cache
    positions: torch.Tensor      # (N, K) probe positions, counted from the suffix's first column


def for_suffixes(probe: Probe, edits: torch.Tensor, cache, token_budget: int, read) -> None:
    """Call `read(suffixes)` until every reasoning token has been replaced once, a block of columns after the other.

    `cache` is that of the clean sequences.  `read` must be repeatable, as for `for_chunks`.
    """
    ends = (probe.positions.amax(1) + 1).tolist()                # columns a row needs, up to its last probe position
    block = max(1, ENOUGH // len(ends))
    for start in range(0, probe.reasoning_mask.shape[1], block):
        items = probe.reasoning_mask[:, start:start + block].nonzero() + torch.tensor([0, start], device=probe.ids.device)
        row_of, token_of = items.T.tolist()                      # one disturbed sequence per item

        def run(chunk: list[int]) -> None:
            read(_suffixes(probe, edits, cache, start, [row_of[i] for i in chunk], [token_of[i] for i in chunk]))

        for_chunks([ends[row] for row in row_of], token_budget, run)


def _suffixes(probe: Probe, edits, cache, start: int, rows: list[int], tokens: list[int]) -> Suffixes:
    part = probe.rows(rows)
    begin, end = probe.prompt_width + start, int(part.positions.amax()) + 1
    columns = torch.tensor(tokens, device=part.ids.device) + probe.prompt_width
    ids = part.ids.scatter(1, columns[:, None], edits[rows, tokens][:, None])[:, begin:end]      # (N, end-begin)
    inputs = {"input_ids": ids, "attention_mask": part.mask[:, :end].long(), "position_ids": part.position_ids[:, begin:end],
              "cache": prefix_cache(cache, rows, begin, end - begin), "use_cache": True}
    return Suffixes(rows, tokens, start, inputs, (part.positions - begin).clamp(min=0))


# --------------------------------------------------------------------------------------------------------------------
# what a token is replaced by

def mask_edits(probe: Probe, mask_id: int) -> torch.Tensor:
    """Replace every token by `mask_id`: (B, S)."""
    return torch.full(probe.reasoning_mask.shape, mask_id, device=probe.ids.device)


@torch.no_grad()
def resample_edits(model, probe: Probe, temperature: float, generator: torch.Generator, token_budget: int) -> torch.Tensor:
    """Replace every reasoning token by a sample of the policy's next-token distribution there, the token itself excluded.

    Temperature 0 takes the best other token.
    One inverse-CDF draw per token, its randomness from `generator` (on the CPU): (B, S) token ids.
    """
    own = probe.ids[:, probe.prompt_width:]                                          # (B, S)
    edits, uniforms = own.clone(), torch.rand(own.shape, generator=generator).to(own.device)

    def edit_rows(rows: list[int]) -> None:
        part, mask = probe.rows(rows), probe.reasoning_mask[rows]
        predicts = torch.zeros_like(part.mask)
        predicts[:, probe.prompt_width - 1:-1] = mask                                # the column before each token
        logits = model(input_ids=part.ids, attention_mask=part.mask.long(), position_ids=part.position_ids,
                       use_cache=False, logits_to_keep=predicts).logits              # (N, V)
        logits = logits.float().clamp(min=LOGIT_FLOOR).scatter(1, own[rows][mask][:, None], -torch.inf)
        picked, _, _ = pick_tokens(logits, uniforms[rows][mask], temperature, top_p=1.0)
        edits[rows] = own[rows].masked_scatter(mask, picked)

    budget = min(token_budget, EDIT_LOGITS // model.config.get_text_config().vocab_size)
    with eval_mode(model):
        for_chunks([probe.ids.shape[1]] * len(own), budget, edit_rows)
    return edits
