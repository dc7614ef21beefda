"""Scores and weights of the tokens of given completions, by any method: what attribute.py prints and paints.

    from oar.attribution import attribute
    result = attribute("lab", "x 3 y 5 ; x + 4 ?", "so x : 3 + 4 = 7 ; #### 7 5", methods=["oar_p", "oar_tg"])
    print(result.tokens, result.weights["oar_p"])

A weight is the factor on the completion's advantage, token advantage / A_i; the training code itself computes it
(`credit.assign_credit`).  `importance` is the score before the gate, and KTAE's key value where there is no gate.
"""
from dataclasses import dataclass, replace

import torch

from oar import lab, models
from oar.batch import Batch, decode, eval_mode, pad, position_ids, random_stream
from oar.credit import CreditConfig, assign_credit
from oar.data import encode_prompt
from oar.errors import UserError
from oar.models import Policy
from oar.oracle import causal_tokens
from oar.probe import Segments, segment
from oar.rollout import pick_tokens
from oar.verify import extract_answer

DEFAULT_METHODS = ("oar_p", "oar_g", "oar_f", "oar_t", "oar_tg", "entropy", "random")
NEEDS_GROUP = ("ktae",)      # compares the completions of one problem


@dataclass
class Attribution:
    """One completion, token by token.  Every list has one entry per token; the dicts are keyed by method."""
    problem: str
    answer: str                            # the accepted final answer (the completion's own when no gold is known)
    tokens: list[str]                      # their texts join to the completion
    parts: list[str]                       # "reasoning", "conclusion", "answer" or "tail"
    roles: list[str]                       # lab: "result", "operand, no effect", "filler", ...; elsewhere empty
    importance: dict[str, list[float]]
    weights: dict[str, list[float]]
    causal: list[bool] | None              # the oracle's marks, None when it was not asked


def attribute(model: str | Policy, problem: str, completion: str, methods=DEFAULT_METHODS, **settings) -> Attribution:
    """Score a given completion of a problem.  `settings` are fields of CreditConfig, e.g. probe="last"."""
    policy = models.load(model, models.pick_device("auto")) if isinstance(model, str) else model
    batch = batch_of_texts(policy, problem, [completion])
    return attribute_rows(policy, batch, [0], problem, [None], torch.ones(1), methods, CreditConfig(**settings))[0]


@torch.no_grad()
def batch_of_texts(policy: Policy, problem: str, completions: list[str]) -> Batch:
    """Given completions as if the policy had sampled them: log-probabilities and entropies from one forward."""
    tokenizer, device = policy.tokenizer, policy.model.device
    prompt = encode_prompt(policy, problem)
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in completions]
    if policy.is_lab and (unknown := [w for text in [problem, *completions] for w in text.split() if w not in lab.VOCABULARY]):
        raise UserError(f"{unknown[0]!r} is not a word of the lab's language")
    if not prompt or not all(rows):
        raise UserError("the problem and the completion must hold at least one token")
    prompts, prompt_mask = pad([prompt] * len(rows), "left", tokenizer.pad_token_id, device)
    ids, mask = pad(rows, "right", tokenizer.pad_token_id, device)                   # (B, T)
    everything = torch.cat([prompt_mask, mask], 1)
    predicts = torch.zeros_like(everything)
    predicts[:, len(prompt) - 1:-1] = mask
    with eval_mode(policy.model):
        logits = policy.model(input_ids=torch.cat([prompts, ids], 1), attention_mask=everything.long(), use_cache=False,
                              position_ids=position_ids(everything), logits_to_keep=predicts).logits     # (N, V)
    _, _, flat = pick_tokens(logits, torch.zeros(len(logits), device=device), 1.0, top_p=1.0)
    entropy, logprobs = torch.zeros(2, *mask.shape, device=device)
    entropy[mask], logprobs[mask] = flat, logits.float().log_softmax(-1).gather(1, ids[mask][:, None])[:, 0]
    finished = torch.tensor([row[-1] in policy.eos_ids for row in rows], device=device)
    return Batch(prompts, prompt_mask, ids, mask, logprobs, entropy, finished, [decode(tokenizer, row) for row in rows])


def attribute_rows(policy: Policy, batch: Batch, rows: list[int], problem: str, golds: list, rewards: torch.Tensor, methods,
                   config: CreditConfig, oracle: str = "none", temperature: float = 1.0, token_budget: int = 32768,
                   max_new_tokens: int = 0, stop_strings: list[str] = (), seed: int = 0) -> list[Attribution]:
    """Score some rows of a group (all rows of `batch` answer `problem`); golds (None: the row's own answer) per row."""
    advantages = torch.zeros(len(batch), device=batch.prompt_ids.device)
    advantages[rows] = 1.0
    roles = lab_roles(policy, batch, problem) if policy.is_lab else None
    segments = [segment(policy.tokenizer, batch.row_ids(row), policy.eos_ids) for row in range(len(batch))]
    importance, weights = {}, {}
    for method in methods:
        result = assign_credit(policy, batch, rewards.to(advantages.device), advantages, replace(config, method=method), len(batch),
                               temperature, random_stream(seed, method, "attribution"), token_budget, roles)
        weights[method] = result.token_advantages                                    # A = 1, so w = the token's advantage
        importance[method] = result.importance if method not in NEEDS_GROUP else result.token_advantages - advantages[:, None]
    answers = [gold or extract_answer(batch.texts[row]) or "" for row, gold in zip(rows, golds)]
    causal = None
    if oracle != "none":
        causal = causal_tokens(policy, batch.rows(rows), [segments[row] for row in rows], answers, oracle,
                               max(max_new_tokens, batch.completion_ids.shape[1]), token_budget, stop_strings)
    pick = (lambda table, row: {m: [float(f"{x:.5g}") for x in table[m][row][batch.completion_mask[row]].tolist()] for m in methods})
    return [Attribution(problem, answers[i] if isinstance(answers[i], str) else answers[i][0],
                        token_texts(policy.tokenizer, batch.row_ids(row)), part_names(segments[row], len(batch.row_ids(row))),
                        [role_name(r) for r in roles[row]] if roles else [""] * len(batch.row_ids(row)), pick(importance, row),
                        pick(weights, row), causal[i][:len(batch.row_ids(row))].tolist() if oracle != "none" else None)
            for i, row in enumerate(rows)]


def lab_roles(policy: Policy, batch: Batch, problem: str) -> list[list[lab.TokenRole]]:
    try:
        parsed = lab.parse_problem(problem)
    except (ValueError, TypeError, KeyError):
        raise UserError(f"not a lab problem: {problem!r} (example: \"x 3 y 5 ; x + 4 ; y * x ?\")") from None
    return [lab.label_tokens(parsed, policy.tokenizer.convert_ids_to_tokens(batch.row_ids(row))) for row in range(len(batch))]


def role_name(role: lab.TokenRole) -> str:
    return role.kind + (", no effect" if role.kind in ("operand", "result") and not role.matters else "")


def part_names(cut: Segments, length: int) -> list[str]:
    ends = [("reasoning", cut.reasoning_end), ("conclusion", cut.answer_start), ("answer", cut.answer_end), ("tail", length)]
    return [next(name for name, end in ends if t < end) for t in range(length)]


def token_texts(tokenizer, ids: list[int]) -> list[str]:
    """The text each token adds; special tokens by name.  A token inside a multi-byte character adds "" until it is whole."""
    texts, before = [], ""
    for t, token in enumerate(ids):
        after = decode(tokenizer, ids[:t + 1]).rstrip("\ufffd")
        grown = after.startswith(before)
        special = token in tokenizer.all_special_ids
        texts.append(tokenizer.convert_ids_to_tokens(token) if special else after[len(before):] if grown else decode(tokenizer, [token]))
        before = after
    return texts
