"""OAR-G's gradient against finite differences, oar_f against KL, bfloat16, and what attribution must leave alone."""
import copy

import pytest
import torch
from conftest import EOS_ID, FAMILIES, PAD_ID, tiny_model

from oar import gradnoise, perturb
from oar.probe import PROBES, build_probe, divergence, forced_targets, outcome, probe_logits, segment


def probe_of(batch, tokenizer, kind="answer_mean"):
    segments = [segment(tokenizer, batch.row_ids(row), (EOS_ID,)) for row in range(len(batch))]
    return build_probe(batch, segments, kind, tokenizer.encode("####"), PAD_ID)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def oar_g(model, probe, noise_std=1e-3, draws=1, budget=10 ** 6, seed=0):
    return gradnoise.oar_g(model, probe, noise_std, draws, seeded(seed), budget)


@pytest.mark.parametrize("kind", PROBES)
@torch.no_grad()
def test_oar_g_is_the_slope_of_j_along_each_embedding(model, lab_batch, tokenizer, kind):
    """s_t = |dJ/da| when the embedding of t is moved by a * e_t at the noisy point: central differences, large noise."""
    probe = probe_of(lab_batch, tokenizer, kind)
    with torch.enable_grad():
        importance = oar_g(model, probe, noise_std=0.3)
    embeds = gradnoise.input_embeddings(model, probe.ids)
    logits = probe_logits(model, probe, inputs_embeds=embeds)
    probe = forced_targets(probe, logits)
    seeds = torch.randint(2 ** 62, (len(lab_batch), 1), generator=seeded())[:, 0].tolist()
    noisy = embeds.clone()
    noisy[:, probe.prompt_width:] += 0.3 * gradnoise.row_noise(seeds, probe.reasoning_mask, embeds.shape[-1])

    def j(point):
        return divergence(outcome(logits, probe), outcome(probe_logits(model, probe, inputs_embeds=point), probe), kind)

    step, checked = 1e-2, 0
    for t in range(probe.reasoning_mask.shape[1]):
        shift = torch.zeros_like(embeds)
        shift[:, probe.prompt_width + t] = step * embeds[:, probe.prompt_width + t]
        slope = (j(noisy + shift) - j(noisy - shift)) / (2 * step)
        rows = probe.reasoning_mask[:, t]
        assert torch.allclose(importance[rows, t], slope[rows].abs(), rtol=0.05, atol=2e-3 * importance.max())
        checked += int(rows.sum())
    assert checked == int(probe.reasoning_mask.sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_oar_f_is_the_kl_of_a_small_scaling(family, lab_batch, tokenizer):
    """KL(p || p with e_t scaled by 1 - a) = 1/2 a^2 s_t^2 to second order, in float64."""
    model = tiny_model(family)
    probe = probe_of(lab_batch.rows([1]), tokenizer)
    importance = gradnoise.oar_f(model, probe, 1500, seeded(), 10 ** 6)[0]
    model = model.double()
    embeds = gradnoise.input_embeddings(model, probe.ids)

    @torch.no_grad()
    def logprobs(t: int, scale: float):
        scaled = embeds.clone()
        scaled[:, probe.prompt_width + t] *= scale
        return probe_logits(model, probe, inputs_embeds=scaled).mean(1).log_softmax(-1)[0]

    a, expected = 1e-3, []
    for t in range(int(probe.reasoning_mask.sum())):
        clean = logprobs(t, 1.0)
        kls = [(clean.exp() * (clean - logprobs(t, 1 + sign * a))).sum() for sign in (1, -1)]      # odd orders cancel
        expected.append((kls[0] + kls[1]).sqrt() / a)
    expected = torch.stack(expected).float()
    assert torch.allclose(importance[:len(expected)], expected, rtol=0.12, atol=1e-3 * expected.max().item())


@pytest.mark.parametrize("kind", PROBES)
@pytest.mark.parametrize("score", ["oar_g", "oar_f"])
def test_budget_and_padding_do_not_matter(model, lab_batch, tokenizer, kind, score):
    from conftest import make_batch
    prompts = [p[m].tolist() for p, m in zip(lab_batch.prompt_ids, lab_batch.prompt_mask)]
    wide = make_batch([*prompts, [7] * 60], [*map(lab_batch.row_ids, range(4)), tokenizer.encode("so #### 1 2")], tokenizer)

    def run(batch, budget):
        probe = probe_of(batch, tokenizer, kind)
        if score == "oar_g":
            return oar_g(model, probe, budget=budget)[:4]
        return gradnoise.oar_f(model, probe, 8, torch.Generator().manual_seed(0), budget)[:4]

    whole = run(lab_batch, 10 ** 6)
    assert whole.max() > 0
    assert torch.allclose(run(lab_batch, 1), whole, rtol=1e-3, atol=1e-3 * whole.max().item())
    if score == "oar_g":                             # oar_f draws per batch shape, so only its budget is free
        assert torch.allclose(run(wide, 10 ** 6), whole, rtol=1e-3, atol=1e-3 * whole.max().item())


def ranks(values):
    return values.argsort().argsort().float()


@pytest.mark.parametrize("score", ["oar_g", "oar_f"])
def test_bfloat16_ranks_agree_with_float32(model, lab_batch, tokenizer, score):
    probe, half = probe_of(lab_batch, tokenizer), copy.deepcopy(model).bfloat16()

    def run(m):
        return oar_g(m, probe) if score == "oar_g" else gradnoise.oar_f(m, probe, 64, seeded(), 10 ** 6)

    full, low = run(model), run(half)
    for row, mask in enumerate(probe.reasoning_mask):
        if mask.sum() > 4:
            assert torch.corrcoef(torch.stack([ranks(full[row, mask]), ranks(low[row, mask])]))[0, 1] > 0.9
        assert mask.sum() == 0 or low[row].max() > 0                                 # never all zero


def test_autocast_does_not_reach_oar_g(model, lab_batch, tokenizer):
    probe = probe_of(lab_batch, tokenizer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = oar_g(model, probe)
    assert torch.equal(inside, oar_g(model, probe))


def test_more_draws_scatter_less(lab_batch, tokenizer):
    model, probe = tiny_model("llama"), None
    probe = probe_of(lab_batch.rows([1]), tokenizer)

    def spread(draws):
        runs = torch.stack([oar_g(model, probe, draws=draws, seed=s)[0] for s in range(6)])
        runs = runs / runs.sum(1, keepdim=True)
        return runs.std(0).sum()

    assert spread(16) < 0.6 * spread(1)


@pytest.mark.parametrize("method", ["oar_g", "oar_f", "oar_p", "resample"])
@pytest.mark.parametrize("training", [False, True])
def test_attribution_leaves_everything_as_it_was(lab_batch, tokenizer, method, training):
    model, probe = tiny_model("gpt2", dropout=0.2), probe_of(lab_batch, tokenizer)
    model.train(training)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    runs = {"oar_g": lambda: oar_g(model, probe), "oar_f": lambda: gradnoise.oar_f(model, probe, 2, seeded(), 10 ** 6),
            "oar_p": lambda: perturb.oar_p(model, probe, perturb.mask_edits(probe, PAD_ID), 10 ** 6),
            "resample": lambda: perturb.resample_edits(model, probe, 1.0, seeded(), 10 ** 6)}
    first, second = runs[method](), runs[method]()
    assert torch.equal(first, second)                                                # dropout is off while scoring
    assert model.training == training and torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_and_frozen_weights(model, lab_batch, tokenizer, reentrant):
    probe = probe_of(lab_batch, tokenizer)
    expected = oar_g(model, probe)
    model.requires_grad_(False)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    assert torch.allclose(oar_g(model, probe), expected, rtol=1e-4, atol=1e-7)
