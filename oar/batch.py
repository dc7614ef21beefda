"""The one container that flows through a training step, and padding done in one place.

Shape letters used everywhere:  B completions (prompts x G), G completions per prompt, P longest prompt,
T longest completion, V vocabulary, H hidden size.  Prompts are padded on the left and completions on the right, so
completion token t of every row sits in column P + t.  Masks come from lengths, never from token ids: the pad id may
equal the eos id.
"""
import hashlib
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from oar import halving


@dataclass
class Batch:
    """Sampled completions.  Long, bool and float32 tensors on the model's device."""
    prompt_ids: torch.Tensor          # (B, P) left-padded
    prompt_mask: torch.Tensor         # (B, P) bool
    completion_ids: torch.Tensor      # (B, T) right-padded
    completion_mask: torch.Tensor     # (B, T) bool: tokens through the first EOS, nothing after
    logprobs: torch.Tensor            # (B, T) of the sampler, at the sampling temperature; 0 where padded
    entropy: torch.Tensor             # (B, T) of the sampler's distribution, nats; 0 where padded
    finished: torch.Tensor            # (B,) bool: ended by itself (EOS or stop string), not cut at the token limit
    texts: list[str]                  # decoded completions, special tokens left out

    def __len__(self) -> int:
        return len(self.texts)

    def row_ids(self, row: int) -> list[int]:
        """Completion token ids of one row, without padding."""
        return self.completion_ids[row][self.completion_mask[row]].tolist()

    def rows(self, index: list[int]) -> "Batch":
        """The rows of `index`, in that order, with padding that no row needs cut away."""
        at = torch.tensor(index, device=self.prompt_ids.device)
        prompt_mask, completion_mask = self.prompt_mask[at], self.completion_mask[at]
        p = int(prompt_mask.sum(1).max())
        t = max(1, int(completion_mask.sum(1).max()))
        left, right = slice(prompt_mask.shape[1] - p, None), slice(0, t)
        return Batch(self.prompt_ids[at][:, left], prompt_mask[:, left], self.completion_ids[at][:, right],
                     completion_mask[:, right], self.logprobs[at][:, right], self.entropy[at][:, right],
                     self.finished[at], [self.texts[i] for i in index])


def join(parts: list[Batch], order: list[int], pad_id: int) -> Batch:
    """One batch from parts; `order` holds the row number that each row of the parts, one after the other, is to have."""
    prompt, completion = (max(getattr(part, name).shape[1] for part in parts) for name in ("prompt_ids", "completion_ids"))
    back = torch.tensor(order).argsort().to(parts[0].prompt_ids.device)

    def stack(name: str, value=0) -> torch.Tensor:
        rows = [getattr(part, name) for part in parts]
        if name != "finished":
            left = name.startswith("prompt")
            gaps = [(prompt if left else completion) - x.shape[1] for x in rows]
            rows = [torch.nn.functional.pad(x, (gap, 0) if left else (0, gap), value=value) for x, gap in zip(rows, gaps)]
        return torch.cat(rows)[back]

    texts = [text for part in parts for text in part.texts]
    return Batch(stack("prompt_ids", pad_id), stack("prompt_mask"), stack("completion_ids", pad_id), stack("completion_mask"),
                 stack("logprobs"), stack("entropy"), stack("finished"), [texts[i] for i in back.tolist()])


def pad(rows: list[list[int]], side: str, value: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token lists as one tensor (N, longest) and its bool mask, padded with `value` on side "left" or "right"."""
    width = max(1, max(map(len, rows)))
    ids = torch.full((len(rows), width), value, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, place] = torch.tensor(row, dtype=torch.long)
        mask[i, place] = True
    return ids.to(device), mask.to(device)


def decode(tokenizer, ids: list[int]) -> str:
    """The text that is graded and segmented: special tokens left out, spaces as sampled."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def position_ids(mask: torch.Tensor) -> torch.Tensor:
    """Positions that ignore padding (N, L): a row reads the same alone and behind pads, also with absolute positions."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def random_stream(*key) -> torch.Generator:
    """A CPU generator seeded by the key, e.g. random_stream(seed, step, "rollout").

    Every random number of a run comes from such a stream and none from a global generator: a resumed run draws what
    the uninterrupted one would have drawn, and a method that draws more does not shift the others.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


@contextmanager
def eval_mode(model):
    """Score with dropout off, and put the model's train/eval mode back afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def chunks_by_budget(lengths: list[int], budget: int) -> list[list[int]]:
    """Split row numbers, longest first, into chunks whose padded size (rows x longest) stays within `budget` tokens.

    Similar lengths end up together, so little is padded; a row longer than the budget gets a chunk of its own.
    """
    todo = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    chunks = []
    while todo:
        size = max(1, budget // max(1, lengths[todo[0]]))
        chunks.append(todo[:size])
        todo = todo[size:]
    return chunks


def for_chunks(lengths: list[int], budget: int, run) -> None:
    """Call `run(rows)` on chunks of at most `budget` tokens; when memory runs out, halve the chunk and go on.

    The halved budget stays for the rest of the phase (halving.py), which also says so.  `run` must be repeatable (write its
    result by row number).  A single row that does not fit raises the device's error.
    """
    todo = list(range(len(lengths)))
    while todo:
        rows = [todo[i] for i in chunks_by_budget([lengths[row] for row in todo], halving.allowed(budget))[0]]
        try:
            run(rows)
        except (RuntimeError, MemoryError) as error:
            if not halving.ran_out(error) or len(rows) == 1:
                raise
            budget = halving.halve(len(rows), max(lengths[row] for row in rows) * (len(rows) // 2))
        else:
            done = set(rows)
            todo = [row for row in todo if row not in done]
