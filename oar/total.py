"""oar_t: total effect, credit that flows back through the chain of thought (ours).

OAR-P holds every later token fixed, so it sees only the *direct* effect of token t on the answer: once a later token
states a result, the tokens that led to it seem idle.  The same disturbed forwards also tell how much each later token
depended on t.  With p(u) the probability of the token that was written at u, clean and with t replaced:

    D[t,u] = max(0, p_clean(u) - p_t(u))                       edge t -> u, in [0, 1]
    d[t]   = the same drop for the answer                      edge t -> answer
    I(t)   = max( d[t], max over u > t of D[t,u] * I(u) )      from the last token to the first

I(t) is the strongest chain from t to the answer, the product of its links.  The answer's drop follows the probe: `last` its
first token, `answer_mean` the mean over its tokens, `answer_joint` the drop of exp(phi).

1. Why this edge and not total variation or a clipped KL: those also see shifts among tokens that nobody wrote, most of them
   among interchangeable fillers.  Why the maximum and not noisy-or, 1 - (1 - d) prod(1 - D I): many weak edges add up to 1
   there and the ranking is lost.  (Chosen on validation completions: python -m benchmarks.edges.)
2. It takes the body's hidden states and applies the output head to a bounded number of positions at a time: no
   (length, V) tensor.  The edges of a chunk are (rows, S, S).
3. Replacing a token by the policy's best other token (`--perturb other`) keeps the disturbed text plausible and ranks
   better than the mask, which upsets everything after it.
"""
import torch
from transformers import DynamicCache

from oar.batch import eval_mode, for_chunks
from oar.errors import UserError
from oar.perturb import Suffixes, for_suffixes
from oar.probe import LOGIT_FLOOR, Probe, forced_targets

LOGITS_AT_ONCE = 2 ** 25     # numbers (128 MiB in float32): positions x V that the head computes together


@torch.no_grad()
def oar_t(model, probe: Probe, edits: torch.Tensor, token_budget: int) -> torch.Tensor:
    """Total effect of every reasoning token: edits (B, S) token ids -> importance (B, S) float32 in [0, 1]."""
    importance = torch.zeros(probe.reasoning_mask.shape, device=probe.ids.device)    # (B, S)

    def score_rows(rows: list[int]) -> None:
        direct, edges = effects(model, probe.rows(rows), edits[rows], token_budget)
        importance[rows] = strongest_chain(direct, edges)

    with eval_mode(model):
        for_chunks([probe.ids.shape[1]] * len(importance), token_budget, score_rows)
    return importance


def strongest_chain(direct: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """I(t) = max(d[t], max_u D[t,u] I(u)): direct (R, S), edges (R, S, S) zero unless u > t -> (R, S)."""
    credit = direct.clone()
    for t in reversed(range(direct.shape[1])):
        credit[:, t] = torch.maximum(direct[:, t], (edges[:, t] * credit).amax(1))
    return credit


def effects(model, probe: Probe, edits: torch.Tensor, token_budget: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How replacing token t lowers the probability of the answer, (R, S), and of every later token, (R, S, S)."""
    mask = probe.reasoning_mask
    edges = torch.zeros(*mask.shape, mask.shape[1], device=mask.device)              # (R, S, S) row, replaced, later
    direct = torch.zeros(mask.shape, device=mask.device)
    out = model.base_model(input_ids=probe.ids, attention_mask=probe.mask.long(), position_ids=probe.position_ids,
                           cache=DynamicCache(), use_cache=True)
    probe = forced_targets(probe, head(model, take(out.last_hidden_state, probe.positions)))
    everything = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    clean, clean_answer = written_probabilities(model, out.last_hidden_state, probe, everything, 0, mask)

    def read(suffixes: Suffixes) -> None:
        rows, tokens, begin = suffixes.rows, torch.tensor(suffixes.tokens, device=mask.device), probe.prompt_width + suffixes.start
        hidden = model.base_model(**suffixes.inputs).last_hidden_state               # (N, L', H)
        later = torch.arange(suffixes.start + 1, mask.shape[1], device=mask.device).expand(len(rows), -1)    # (N, U)
        wanted = mask[rows][:, suffixes.start + 1:] & (later > tokens[:, None])
        p, answer = written_probabilities(model, hidden, probe.rows(rows), later, begin, wanted)
        drop = (clean[rows][:, suffixes.start + 1:] - p).clamp(min=0) * wanted
        edges[rows, suffixes.tokens, suffixes.start + 1:] = drop
        direct[rows, suffixes.tokens] = answer_drop(clean_answer[rows], answer, probe.rows(rows))

    for_suffixes(probe, edits, out.cache, token_budget, read)
    return direct, edges


def answer_drop(clean: torch.Tensor, disturbed: torch.Tensor, probe: Probe) -> torch.Tensor:
    """Drop of the answer's probability, in [0, 1]: probabilities of its tokens (N, K) twice -> (N,)."""
    mask = probe.position_mask
    mean = (lambda x: (x * mask).sum(1) / mask.sum(1))
    if probe.kind == "answer_joint":                 # exp(phi): the geometric mean
        return (mean(clean.clamp(min=1e-30).log()).exp() - mean(disturbed.clamp(min=1e-30).log()).exp()).clamp(min=0)
    return mean((clean - disturbed).clamp(min=0))


def written_probabilities(model, hidden: torch.Tensor, probe: Probe, tokens: torch.Tensor, begin: int,
                          wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of the tokens that were written: of reasoning `tokens` (N, U) where `wanted`, else 0, and of the
    answer (N, K).  hidden (N, L', H) begins at column `begin`; the state before a token predicts it."""
    columns = torch.cat([probe.prompt_width + tokens - 1, probe.positions], 1)       # (N, U+K)
    own = probe.ids.gather(1, probe.prompt_width + tokens)
    targets = torch.cat([own, probe.targets.clamp(min=0)], 1)
    needed = torch.cat([wanted, probe.position_mask], 1)
    states = take(hidden, (columns - begin).clamp(0, hidden.shape[1] - 1))[needed]   # (M, H)
    p = torch.zeros(columns.shape, device=hidden.device)
    parts = zip(states.split(positions_at_once(model)), targets[needed].split(positions_at_once(model)))
    p[needed] = torch.cat([token_logprobs(head(model, h), t) for h, t in parts]).exp()
    return p[:, :tokens.shape[1]], p[:, tokens.shape[1]:]


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log p(token) in float32: (M, V), (M,) -> (M,)."""
    logits = logits.float().clamp(min=LOGIT_FLOOR)
    return logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(1)


def take(hidden: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """States at chosen columns: (N, L, H), (N, U) -> (N, U, H)."""
    return hidden.gather(1, columns[..., None].expand(-1, -1, hidden.shape[-1]))


def positions_at_once(model) -> int:
    return max(1, LOGITS_AT_ONCE // model.config.get_text_config().vocab_size)


def head(model, states: torch.Tensor) -> torch.Tensor:
    """The model's output head: (..., H) -> (..., V). UserError for families that change the logits after it."""
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config.get_text_config(), name, None) not in (None, 1.0):
            raise UserError(f"oar_t and oar_tg cannot use {type(model).__name__}: it changes the logits after the head ({name})")
    return model.get_output_embeddings()(states)
