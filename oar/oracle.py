"""The counterfactual oracle: which tokens of a correct completion really decide its answer (paper section 5).

Token t of a correct completion is *causal* when exchanging it flips the answer: with the policy's best other token in
its place the re-decoded answer is wrong, while with the token itself it is right.  Two readings:

    regenerate="all"       everything after t is decoded again, greedily           total effect
    regenerate="answer"    the later reasoning and the conclusion stay as they
                           were written, only the answer is decoded again          direct effect

1. Completions that are wrong, or do not mark their answer, have no causal tokens; only reasoning tokens are tried.
2. Greedy decoding makes the oracle deterministic, and a token's verdict depends on its own completion alone.
3. The control ("with the token itself") matters for sampled completions: where greedy decoding would go wrong anyway, a
   wrong answer says nothing about the token.  It is cheap: as long as the completion takes the greedy choices, its
   continuation stays the same, so only departures from them are decoded ("answer": one control per completion).
4. The clean completion is read once.  An edited copy shares its keys and values, hides those from t on, and appends.
"""
from typing import NamedTuple

import torch
from transformers import DynamicCache

from oar.batch import Batch, decode, eval_mode, for_chunks, pad, position_ids
from oar.models import Policy
from oar.probe import Segments
from oar.rollout import cut_at_stop
from oar.verify import is_correct

ORACLES = ("answer", "all")
ANSWER_ROOM = 8       # tokens by which a re-decoded answer may be longer than the written one


class Trial(NamedTuple):
    """A re-decoding: completion `row` keeps its first `kept` tokens, is given `forced`, and decodes at most `room` more."""
    row: int
    kept: int
    forced: list[int]
    room: int


@torch.no_grad()
def causal_tokens(policy: Policy, batch: Batch, segments: list[Segments], golds: list, regenerate: str, max_new_tokens: int,
                  token_budget: int, stop_strings: list[str] = ()) -> torch.Tensor:
    """The causal tokens of a batch, (B, T) bool; golds as `is_correct` takes them, one per completion.

    `max_new_tokens` is the longest completion that "all" decodes, `stop_strings` end one as they do in sampling.  A
    forward holds about `token_budget` tokens, cache included.
    """
    causal = torch.zeros_like(batch.completion_mask)                                 # (B, T)
    right = [row for row, cut in enumerate(segments) if cut.answered and is_correct(batch.texts[row], golds[row])]
    width = batch.prompt_ids.shape[1] + batch.completion_ids.shape[1]

    def judge_rows(chunk: list[int]) -> None:
        rows = [right[i] for i in chunk]
        part, cuts = batch.rows(rows), [segments[row] for row in rows]
        cache, greedy, other = read_clean(policy.model, part)
        ending = {token for row in other for token in row if token in policy.eos_ids
                  or any(stop in decode(policy.tokenizer, [token]) for stop in stop_strings)}
        trials = {}                                                                  # (row, t, is it the control?) -> Trial
        for row, cut in enumerate(cuts):
            trials |= plan_trials(row, part.row_ids(row), cut, greedy[row], other[row], regenerate, max_new_tokens, ending)
        verdicts = run_trials(policy, part, cache, trials, [golds[row] for row in rows], token_budget, stop_strings)
        for row, cut in enumerate(cuts):
            holds = True                             # does the completion itself, decoded again from here, come out right?
            for t in reversed(range(cut.reasoning_end)):
                holds = verdicts.get((row, t, True), holds)
                causal[rows[row], t] = holds and not verdicts[row, t, False]

    with eval_mode(policy.model):
        for_chunks([width] * len(right), token_budget, judge_rows)
    return causal


def read_clean(model, part: Batch) -> tuple[DynamicCache, list[list[int]], list[list[int]]]:
    """One forward over prompts and completions: the cache, and per completion token the policy's most likely token there
    and its most likely token other than the one written."""
    ids, mask = torch.cat([part.prompt_ids, part.completion_ids], 1), torch.cat([part.prompt_mask, part.completion_mask], 1)
    predicts = torch.zeros_like(mask)
    predicts[:, part.prompt_ids.shape[1] - 1:-1] = part.completion_mask              # the column before each token
    out = model(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask), cache=DynamicCache(),
                use_cache=True, logits_to_keep=predicts)
    first, second = out.logits.topk(2, -1).indices.T                                 # (N,) twice, N completion tokens
    own = part.completion_ids[part.completion_mask]
    other, lengths = torch.where(first == own, second, first), part.completion_mask.sum(1).tolist()
    return out.cache, [x.tolist() for x in first.split(lengths)], [x.tolist() for x in other.split(lengths)]


def plan_trials(row: int, ids: list[int], cut: Segments, greedy: list[int], other: list[int], regenerate: str,
                max_new_tokens: int, ending: set[int]) -> dict[tuple, Trial]:
    """The re-decodings of one completion: every reasoning token exchanged, and the controls that differ.  A token of
    `ending` ends the completion, so nothing is decoded after it."""
    trials = {}
    for t in range(cut.reasoning_end):
        rest, room = [], max_new_tokens - t - 1
        if regenerate == "answer":
            rest, room = ids[t + 1:cut.answer_start], cut.answer_end - cut.answer_start + ANSWER_ROOM
        ended = regenerate == "all" and other[t] in ending
        trials[row, t, False] = Trial(row, t, [other[t]] + rest, 0 if ended else room)
        departs = regenerate == "all" and ids[t + 1] != greedy[t + 1]                # decoding goes another way from here
        if departs or t == cut.reasoning_end - 1:
            trials[row, t, True] = Trial(row, t, [ids[t]] + rest, room)
    return trials


def run_trials(policy: Policy, part: Batch, cache: DynamicCache, trials: dict[tuple, Trial], golds: list, token_budget: int,
               stop_strings: list[str]) -> dict[tuple, bool]:
    """Whether each trial's answer is right."""
    names, verdicts = list(trials), {}
    width = part.prompt_ids.shape[1] + part.completion_ids.shape[1]

    def judge(chunk: list[int]) -> None:
        todo = [trials[names[i]] for i in chunk]
        for i, trial, decoded in zip(chunk, todo, continue_greedily(policy, part, cache, todo, stop_strings)):
            text = decode(policy.tokenizer, part.row_ids(trial.row)[:trial.kept] + trial.forced + decoded)
            verdicts[names[i]] = is_correct(text, golds[trial.row])

    for_chunks([width + len(trial.forced) + max(0, trial.room) for trial in trials.values()], token_budget, judge)
    return verdicts


def continue_greedily(policy: Policy, part: Batch, cache: DynamicCache, trials: list[Trial],
                      stop_strings: list[str]) -> list[list[int]]:
    """Greedy continuations of the trials, each up to its room, an end mark or a stop string (left out)."""
    model, device, prompt_width = policy.model, part.prompt_ids.device, part.prompt_ids.shape[1]
    rows = [trial.row for trial in trials]
    cache = DynamicCache([(layer.keys[rows], layer.values[rows]) for layer in cache.layers])
    seen = torch.cat([part.prompt_mask, part.completion_mask], 1)[rows]              # (R, C) cached columns
    kept = torch.tensor([trial.kept for trial in trials], device=device)
    seen[:, prompt_width:] &= torch.arange(part.completion_ids.shape[1], device=device) < kept[:, None]
    ids, given = pad([trial.forced for trial in trials], "left", policy.tokenizer.pad_token_id, device)   # (R, F)
    decoded, live = [[] for _ in trials], [i for i, trial in enumerate(trials) if trial.room > 0]
    if len(live) < len(trials):
        cache.batch_select_indices(torch.tensor(live, dtype=torch.long, device=device))
        ids, given, seen = ids[live], given[live], seen[live]
    while live:
        seen = torch.cat([seen, given], 1)
        logits = model(input_ids=ids, attention_mask=seen.long(), position_ids=position_ids(seen)[:, -ids.shape[1]:],
                       cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        picked = logits.argmax(-1)                                                   # (R,)
        going = []
        for i, row, token in zip(range(len(live)), live, picked.tolist()):
            if token not in policy.eos_ids:
                decoded[row].append(token)
                cut = cut_at_stop(policy.tokenizer, decoded[row], stop_strings) if stop_strings else None
                if cut is not None:
                    del decoded[row][cut:]
                elif len(decoded[row]) < trials[row].room:
                    going.append(i)
        if len(going) < len(live):
            cache.batch_select_indices(torch.tensor(going, dtype=torch.long, device=device))
        ids, seen, live = picked[going, None], seen[going], [live[i] for i in going]
        given = torch.ones_like(ids, dtype=torch.bool)
    return decoded
