"""The outcome probe: what "the final-answer distribution" means, and how far it has moved (paper section 4.1).

A completion is split by the position of its final answer, on the sampled token ids:

    reasoning | conclusion | answer | tail        "so x : 3 + 4 = 7 ;" | "####" | "7 5" | "<eos>"

and the probe is read by teacher forcing on prompt + (disturbed) reasoning + conclusion + answer.  Three operators:

    last           p = softmax(logits that predict the first answer token)
    answer_mean    p = softmax(mean over answer positions of the logits that predict them)    the paper's best
    answer_joint   phi = mean log-likelihood of the answer tokens                             a scalar

The importance of a disturbed token is KL(p_clean || p_disturbed), or phi_clean - phi_disturbed for `answer_joint`.
A completion without an answer gets a forced conclusion appended, for the probe only; all its own tokens are reasoning
and the probe is the next-token distribution there (for `answer_joint`: the log-probability of that distribution's
most likely token stands in for the answer).
"""
import bisect
from dataclasses import dataclass
from typing import NamedTuple

import torch

from oar.batch import Batch, decode, pad, position_ids
from oar.verify import find_answer

PROBES = ("last", "answer_mean", "answer_joint")
FORCED_CONCLUSION = "\n\nThe final answer is \\boxed{"
LOGIT_FLOOR = -1e4     # a suppressed token's -inf becomes a probability of exactly 0, without 0 * inf = NaN


class Segments(NamedTuple):
    """Token spans of a completion: reasoning [0, reasoning_end), conclusion up to answer_start, answer up to
    answer_end, then the tail.  `answered` is False for a completion without an answer (empty answer span)."""
    reasoning_end: int
    answer_start: int
    answer_end: int
    answered: bool


def segment(tokenizer, completion_ids: list[int], eos_ids: tuple[int, ...] = ()) -> Segments:
    """Split sampled ids at their final answer: the one that is graded, where a marker announces it.

    Character offsets become token numbers by decoding prefixes of the ids, which never re-tokenises them.  The token
    that holds the first character of the marker (of the answer) begins the conclusion (the answer).
    """
    own = len(completion_ids)
    while own and completion_ids[own - 1] in eos_ids:
        own -= 1                                    # the end mark is tail, not reasoning
    answer = find_answer(decode(tokenizer, completion_ids))
    if answer is None or answer.marker_start == answer.answer_start:     # nothing marked as the answer
        return Segments(own, own, own, False)

    def prefix_length(tokens: int) -> int:          # characters spelt by the first `tokens` tokens
        # a token may end inside a multi-byte character, which decodes to U+FFFD until the rest has come
        return len(decode(tokenizer, completion_ids[:tokens]).rstrip("\ufffd"))

    def token_at(character: int) -> int:
        return bisect.bisect_right(range(own + 1), character, key=prefix_length) - 1

    start = token_at(answer.answer_start)
    end = bisect.bisect_left(range(own + 1), answer.answer_end, key=prefix_length)
    return Segments(min(token_at(answer.marker_start), start), start, max(end, start + 1), True)


@dataclass
class Probe:
    """Everything needed to read the outcome of a batch: teacher-forced ids and where to look.

    S is the longest reasoning + conclusion + answer; the last answer token is a target only, never an input.
    """
    kind: str
    ids: torch.Tensor               # (B, P+S) prompt left-padded, completion right-padded
    mask: torch.Tensor              # (B, P+S) bool
    prompt_width: int               # P: reasoning token t sits in column P + t
    reasoning_mask: torch.Tensor    # (B, S) bool
    positions: torch.Tensor         # (B, K) columns whose logits predict the answer tokens
    position_mask: torch.Tensor     # (B, K) bool
    targets: torch.Tensor           # (B, K) answer token ids; -1 where there is no answer

    @property
    def position_ids(self) -> torch.Tensor:
        return position_ids(self.mask)

    def rows(self, index) -> "Probe":
        """The rows of `index` (widths stay as they are)."""
        return Probe(self.kind, self.ids[index], self.mask[index], self.prompt_width, self.reasoning_mask[index],
                     self.positions[index], self.position_mask[index], self.targets[index])

    def lengths(self) -> list[int]:
        """Tokens per row, padding left out."""
        return self.mask.sum(1).tolist()


def build_probe(batch: Batch, segments: list[Segments], kind: str, forced_ids: list[int], pad_id: int) -> Probe:
    """Teacher-forced inputs of a batch for probe `kind`; `forced_ids` spell the forced conclusion."""
    device, prompt_width = batch.prompt_ids.device, batch.prompt_ids.shape[1]
    completions, positions, targets = [], [], []
    for row, (reasoning_end, start, end, answered) in enumerate(segments):
        ids = batch.row_ids(row)
        if not answered:
            ids = ids[:reasoning_end] + forced_ids
            start, end = len(ids), len(ids) + 1
        if kind == "last":
            end = start + 1
        completions.append(ids[:end - 1])
        positions.append([prompt_width + t - 1 for t in range(start, end)])
        targets.append(ids[start:end] if answered else [-1])
    ids, mask = pad(completions, "right", pad_id, device)                            # (B, S)
    where, position_mask = pad(positions, "right", prompt_width - 1, device)         # (B, K)
    reasoning_ends = torch.tensor([s.reasoning_end for s in segments], device=device)
    return Probe(kind=kind, ids=torch.cat([batch.prompt_ids, ids], 1), mask=torch.cat([batch.prompt_mask, mask], 1),
                 prompt_width=prompt_width, reasoning_mask=torch.arange(ids.shape[1], device=device) < reasoning_ends[:, None],
                 positions=where, position_mask=position_mask, targets=pad(targets, "right", -1, device)[0])


def reasoning_mask(batch: Batch, segments: list[Segments]) -> torch.Tensor:
    """(B, T) bool: the tokens that are weighted."""
    ends = torch.tensor([s.reasoning_end for s in segments], device=batch.prompt_ids.device)
    return torch.arange(batch.completion_ids.shape[1], device=ends.device) < ends[:, None]


def forced_targets(probe: Probe, clean_logits: torch.Tensor) -> Probe:
    """Give rows without an answer the clean distribution's most likely token as target (`answer_joint` only)."""
    best = clean_logits.argmax(-1)                                                   # (B, K)
    return Probe(**{**vars(probe), "targets": torch.where(probe.targets < 0, best, probe.targets)})


def outcome(logits: torch.Tensor, probe: Probe) -> torch.Tensor:
    """The probed outcome in float32: logits (R, K, V) at `probe.positions` -> log-probabilities (R, V), or phi (R, 1)."""
    logits, mask = logits.float().clamp(min=LOGIT_FLOOR), probe.position_mask        # (R, K, V), (R, K)
    if probe.kind == "answer_joint":
        logprobs = logits.log_softmax(-1).gather(-1, probe.targets.clamp(min=0)[..., None])[..., 0]     # (R, K)
        return (logprobs * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    mean_logits = (logits * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)      # (R, V)
    return mean_logits.log_softmax(-1)


def divergence(clean: torch.Tensor, disturbed: torch.Tensor, kind: str) -> torch.Tensor:
    """How far the outcome moved, (R, V) or (R, 1) -> (R,): KL(clean || disturbed), or phi_clean - phi_disturbed."""
    if kind == "answer_joint":
        return (clean - disturbed)[:, 0]
    return (clean.exp() * (clean - disturbed)).sum(-1)


def probe_logits(model, probe: Probe, **inputs) -> torch.Tensor:
    """Logits at the probe positions only, (R, K, V): the LM head never sees the other positions."""
    inputs = inputs or {"input_ids": probe.ids}
    return model(attention_mask=probe.mask.long(), position_ids=probe.position_ids, use_cache=False,
                 logits_to_keep=probe.positions, **inputs).logits
