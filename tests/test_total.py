"""oar_t and oar_tg: closed forms, serial references, and what must not matter (padding, budget, batch, head chunks, state)."""
import copy

import pytest
import torch
from conftest import EOS_ID, FAMILIES, PAD_ID, make_batch, tiny_model

from oar import perturb, total, totalgrad
from oar.errors import UserError
from oar.probe import PROBES, build_probe, forced_targets, probe_logits, segment

TOLERANCE = 1e-5


def probe_of(batch, tokenizer, kind="answer_mean"):
    segments = [segment(tokenizer, batch.row_ids(row), (EOS_ID,)) for row in range(len(batch))]
    return build_probe(batch, segments, kind, tokenizer.encode("####"), PAD_ID)


def oar_t(model, probe, budget=10 ** 6):
    return total.oar_t(model, probe, perturb.mask_edits(probe, PAD_ID), budget)


def oar_tg(model, probe, draws=1, budget=10 ** 6, seed=0):
    return totalgrad.oar_tg(model, probe, draws, torch.Generator().manual_seed(seed), budget)


def wider(batch, tokenizer):
    """The same four completions among a longer prompt and a longer completion."""
    prompts = [p[m].tolist() for p, m in zip(batch.prompt_ids, batch.prompt_mask)]
    long = tokenizer.encode("so " * 30 + "#### 1 2")
    return make_batch([*prompts, [7] * 60], [*map(batch.row_ids, range(4)), long], tokenizer)


# --------------------------------------------------------------------------------------------------------------------
# oar_t

def test_strongest_chain_of_a_hand_made_graph():
    """Four tokens: 0 -> 1 (.9), 1 -> 3 (.5), 0 -> 3 (.3), 2 -> 3 (.1); the answer hangs on 3 (.8) and on 2 (.2)."""
    edges = torch.zeros(1, 4, 4)
    edges[0, 0, 1], edges[0, 1, 3], edges[0, 0, 3], edges[0, 2, 3] = 0.9, 0.5, 0.3, 0.1
    credit = total.strongest_chain(torch.tensor([[0.0, 0.0, 0.2, 0.8]]), edges)
    # 3: .8    2: max(.2, .1 * .8) = .2    1: .5 * .8 = .4    0: max(.3 * .8, .9 * .4) = .36
    assert torch.allclose(credit, torch.tensor([[0.36, 0.4, 0.2, 0.8]]))


@torch.no_grad()
def reference_oar_t(model, probe, edits):
    """The definition: one disturbed sequence per forward, whole logits, one edge after the other."""
    importance = torch.zeros(probe.reasoning_mask.shape)
    for row in range(len(importance)):
        one = probe.rows([row])
        one = forced_targets(one, probe_logits(model, one))
        tokens = one.reasoning_mask[0].nonzero()[:, 0].tolist()
        targets, positions = one.targets[0][one.position_mask[0]], one.positions[0][one.position_mask[0]]

        def read(ids):
            p = model(input_ids=ids, attention_mask=one.mask.long(), position_ids=one.position_ids).logits[0].softmax(-1)
            own = {u: p[one.prompt_width + u - 1, one.ids[0, one.prompt_width + u]].item() for u in tokens}
            return own, p[positions, targets]

        clean, clean_answer = read(one.ids)
        for t in reversed(tokens):
            ids = one.ids.clone()
            ids[0, one.prompt_width + t] = edits[row, t]
            p, answer = read(ids)
            if one.kind == "answer_joint":
                direct = max(0.0, (clean_answer.log().mean().exp() - answer.log().mean().exp()).item())
            else:
                direct = (clean_answer - answer).clamp(min=0).mean().item()
            chains = [max(0.0, clean[u] - p[u]) * importance[row, u].item() for u in tokens if u > t]
            importance[row, t] = max([direct, *chains])
    return importance


@pytest.mark.parametrize("kind", PROBES)
def test_oar_t_equals_the_serial_definition(model, lab_batch, tokenizer, kind, monkeypatch):
    probe = probe_of(lab_batch, tokenizer, kind)
    for edits in (perturb.mask_edits(probe, PAD_ID), perturb.resample_edits(model, probe, 0.0, torch.Generator(), 10 ** 6)):
        expected = reference_oar_t(model, probe, edits)
        assert expected.max() > 1e-3 and (expected[~probe.reasoning_mask] == 0).all()
        for budget in (1, 200, 10 ** 6):
            assert (total.oar_t(model, probe, edits, budget) - expected).abs().max() < TOLERANCE
    monkeypatch.setattr(total, "LOGITS_AT_ONCE", 100)                                # two positions at a time through the head
    assert (total.oar_t(model, probe, edits, 10 ** 6) - expected).abs().max() < TOLERANCE


def test_mediated_effects_count(lab_batch, tokenizer):
    """oar_t is at least the direct effect, and more somewhere."""
    model = tiny_model("llama")
    probe = probe_of(lab_batch, tokenizer)
    direct, edges = total.effects(model, probe, perturb.mask_edits(probe, PAD_ID), 10 ** 6)
    credit = total.strongest_chain(direct, edges)
    assert (credit >= direct).all() and (credit > direct + 1e-4).any() and (credit <= 1).all()
    assert (edges.tril() == 0).all()                                                 # nothing acts on itself or backwards


def test_other_is_the_best_other_token(lab_batch, tokenizer):
    model = tiny_model("llama")
    probe = probe_of(lab_batch.rows([1]), tokenizer)
    edits = perturb.resample_edits(model, probe, 0.0, torch.Generator(), 10 ** 6)[0]
    logits = model(probe.ids).logits[0, probe.prompt_width - 1:-1]
    for t in range(int(probe.reasoning_mask.sum())):
        ranked = logits[t].argsort(descending=True).tolist()
        ranked.remove(int(probe.ids[0, probe.prompt_width + t]))
        assert edits[t] == ranked[0]


def test_the_head_never_sees_many_positions(model, lab_batch, tokenizer, monkeypatch):
    monkeypatch.setattr(total, "LOGITS_AT_ONCE", 36 * 5)
    sizes = []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: sizes.append(output.numel() // output.shape[-1]))
    probe = probe_of(lab_batch, tokenizer)
    oar_t(model, probe), oar_tg(model, probe)
    assert max(sizes) <= probe.positions.numel()                                     # 8 here: the forced answer's lookup


def test_a_model_that_scales_its_logits_is_refused(lab_batch, tokenizer):
    model = tiny_model("llama")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="final_logit_softcapping"):
        oar_t(model, probe_of(lab_batch, tokenizer))


# --------------------------------------------------------------------------------------------------------------------
# oar_tg

def exact_oar_tg(model, probe):
    """Every g[t,u] by its own backward pass, sums of squares without random signs. One completion."""
    embeds = model.get_input_embeddings()(probe.ids).detach().requires_grad_(True)
    logits = model(inputs_embeds=embeds, attention_mask=probe.mask.long(), position_ids=probe.position_ids).logits[0]    # (L, V)
    probe = forced_targets(probe, logits[probe.positions])
    width, n = probe.prompt_width, int(probe.reasoning_mask.sum())
    own, before = probe.ids[0, width:width + n], logits[width - 1:width + n - 1]     # (n,), (n, V)
    others = before.softmax(-1).scatter(1, own[:, None], 0.0)
    other = (others / others.sum(-1, keepdim=True)) @ model.get_input_embeddings().weight
    difference = (embeds[0, width:width + n] - other).detach()

    def g(states, token):                            # first-order loss of log-odds: (n,)
        p = states.softmax(-1)[token]
        gradient, = torch.autograd.grad((p / (1 - p)).log(), embeds, retain_graph=True)
        return (gradient[0, width:width + n] * difference).sum(-1)

    answers = [g(logits[c], y) for c, y in zip(probe.positions[0][probe.position_mask[0]], probe.targets[0])]
    direct = torch.stack(answers).square().sum(0).sqrt()
    direct = direct / direct.sum()
    p = before.softmax(-1)[range(n), own].detach()
    mediated = torch.stack([g(before[u], own[u]) * p[u] * direct[u].sqrt() for u in range(n)]).square().sum(0).sqrt()
    return direct + mediated / mediated.sum()


@pytest.mark.parametrize("family, kind", [(family, "answer_mean") for family in FAMILIES] + [("llama", "last"), ("llama", "answer_joint")])
def test_oar_tg_estimates_its_definition(family, lab_batch, tokenizer, kind):
    model = tiny_model(family)
    for row in (1, 2):                                                               # answered, and forced
        probe = probe_of(lab_batch.rows([row]), tokenizer, kind)
        expected = exact_oar_tg(model, probe)
        importance = oar_tg(model, probe, draws=400)[0]
        assert torch.allclose(importance[:len(expected)], expected, rtol=0.25, atol=2e-3)
        assert (importance[len(expected):] == 0).all() and abs(importance.sum() - 2) < 1e-4


def test_log_odds_slopes_are_right_where_probabilities_are_one():
    model = tiny_model("llama")
    hidden = torch.randn(1, 3, 32) * 100                                             # p = 1 to float32 for some tokens
    tokens = model.lm_head(hidden).argmax(-1)
    slope, p, other = totalgrad.log_odds_slopes(model, hidden, torch.arange(3)[None], tokens, torch.ones(1, 3, dtype=torch.bool))
    assert p.max() == 1 and slope.isfinite().all() and other.isfinite().all() and (slope.abs().sum(-1) > 0.1).all()


# --------------------------------------------------------------------------------------------------------------------
# both

@pytest.mark.parametrize("kind", PROBES)
@pytest.mark.parametrize("score", [oar_t, oar_tg])
def test_budget_padding_and_company_do_not_matter(model, lab_batch, tokenizer, kind, score):
    whole = score(model, probe_of(lab_batch, tokenizer, kind))
    among = score(model, probe_of(wider(lab_batch, tokenizer), tokenizer, kind))[:4, :whole.shape[1]]
    chunked = score(model, probe_of(lab_batch, tokenizer, kind), budget=1)
    assert whole.max() > 0
    for other in (among, chunked):
        assert torch.allclose(other, whole, rtol=1e-3, atol=1e-3 * whole.max().item())
    if score is oar_t:                                                               # oar_tg's signs belong to the row's place
        part = score(model, probe_of(lab_batch.rows([3, 1]), tokenizer, kind))
        assert torch.allclose(part, whole[[3, 1]][:, :part.shape[1]], atol=TOLERANCE)


@pytest.mark.parametrize("score", [oar_t, oar_tg])
@pytest.mark.parametrize("texts", [["#### 7 5 <eos>"], ["<eos>"], ["so"], ["so <eos>", "#### 1 2"]])
def test_empty_and_single_token_reasoning(model, tokenizer, texts, score):
    batch = make_batch([[12, 5]] * len(texts), [tokenizer.encode(t) for t in texts], tokenizer)
    importance = score(model, probe_of(batch, tokenizer))
    assert importance.isfinite().all() and (importance >= 0).all()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("score", [oar_t, oar_tg])
def test_attribution_leaves_everything_as_it_was(lab_batch, tokenizer, score, training):
    model, probe = tiny_model("gpt2", dropout=0.2), probe_of(lab_batch, tokenizer)
    model.train(training)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert torch.equal(score(model, probe), score(model, probe))                     # dropout is off while scoring
    assert model.training == training and torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("score", [oar_t, oar_tg])
def test_lost_memory_halves_the_work(lab_batch, tokenizer, score, monkeypatch):
    model = tiny_model("llama")
    probe = probe_of(lab_batch, tokenizer)
    expected, forward, lost = score(model, probe), model.base_model.forward, []

    def small_device(*args, attention_mask=None, **kwargs):
        if len(attention_mask) > 2:
            lost.append(len(attention_mask))
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return forward(*args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(model.base_model, "forward", small_device)
    assert torch.allclose(score(model, probe), expected, atol=TOLERANCE) and lost


@pytest.mark.parametrize("score", [oar_t, oar_tg])
def test_bfloat16_ranks_agree_with_float32(model, lab_batch, tokenizer, score):
    probe, half = probe_of(lab_batch, tokenizer), copy.deepcopy(model).bfloat16()
    full, low = score(model, probe), score(half, probe)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = score(model, probe)
    for row, mask in enumerate(probe.reasoning_mask):
        if mask.sum() > 4:
            for other in (low, cast):
                pair = torch.stack([full[row, mask].argsort().argsort().float(), other[row, mask].argsort().argsort().float()])
                assert torch.corrcoef(pair)[0, 1] > 0.7
