"""Out of memory in any phase: the budget is halved, the result is the same, nothing is dropped, and it is said."""
import re
import sys

import pytest
import torch
from conftest import PAD_ID

import train
from oar import checkpoint, halving, models
from oar.batch import for_chunks, join
from oar.rollout import draw_uniforms, sample, sample_in_parts


def small_device(model, rows, phase=None):
    """The model's forward fails above so many rows, as a device would."""
    def check(module, args, inputs):
        given = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
        if len(given) > rows and phase in (None, halving._running[-1].name):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return model.register_forward_pre_hook(check, with_kwargs=True)


def test_a_phase_remembers_its_budget_and_says_so(capsys):
    done, sizes = [], []

    def run(rows):
        sizes.append(len(rows))
        if len(rows) > 3:
            raise RuntimeError("CUDA out of memory")
        done.extend(rows)

    with halving.phase("attribution") as phase:
        for_chunks([10] * 8, 1000, run)
        for_chunks([10] * 4, 1000, run)
    assert sorted(done) == sorted([*range(8), *range(4)]) and sizes == [8, 4, 2, 2, 2, 2, 2, 2] and phase.halvings == 2
    assert capsys.readouterr().err == ("attribution: out of memory with 8 rows at once; going on with 4\n"
                                       "attribution: out of memory with 4 rows at once; going on with 2\n")
    with halving.phase("attribution") as phase:
        for_chunks([10] * 3, 1000, run)
    assert sizes[-1] == 3 and phase.halvings == 0                                    # a new step tries the whole budget again


def test_a_single_row_that_does_not_fit_raises():
    def never(rows):
        raise MemoryError

    with pytest.raises(MemoryError):
        for_chunks([5, 5], 100, never)


def test_other_errors_are_not_taken_for_lost_memory():
    def broken(rows):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        for_chunks([5, 5], 100, broken)


def test_the_cpus_own_words_are_known():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2 ** 60, dtype=torch.uint8)
    assert halving.ran_out(error.value) and halving.ran_out(MemoryError()) and halving.ran_out(RuntimeError("MPS backend out of memory"))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_sampling_in_parts_gives_the_same_batch(policy, rows):
    prompts, uniforms = [[12, 5, 13, 7, 19], [12, 9, 13]], draw_uniforms(6, 12, torch.Generator().manual_seed(0))
    whole = sample(policy, prompts, 3, 12, uniforms)
    hook = small_device(policy.model, rows)
    parts = sample_in_parts(policy, prompts, 3, 12, uniforms)
    hook.remove()
    assert parts.texts == whole.texts and torch.equal(parts.completion_ids, whole.completion_ids) and torch.equal(parts.prompt_ids, whole.prompt_ids)
    for name in ("prompt_mask", "completion_mask", "finished"):
        assert torch.equal(getattr(parts, name), getattr(whole, name))
    assert torch.allclose(parts.logprobs, whole.logprobs, atol=1e-5) and torch.allclose(parts.entropy, whole.entropy, atol=1e-5)


def test_join_restores_order_and_padding(lab_batch):
    parts = [lab_batch.rows([2]), lab_batch.rows([3, 0]), lab_batch.rows([1])]
    whole = join(parts, [2, 3, 0, 1], PAD_ID)
    for name, value in vars(lab_batch).items():
        assert (value == getattr(whole, name)) if name == "texts" else torch.equal(value, getattr(whole, name)), name


@pytest.mark.parametrize("phase, method", [("rollout", "grpo"), ("attribution", "oar_p"), ("attribution", "oar_g"), ("attribution", "oar_f"),
                                           ("attribution", "oar_t"), ("attribution", "oar_tg"), ("update", "grpo")])
def test_a_training_step_on_a_small_device(tmp_path, monkeypatch, phase, method, capsys):
    """Whichever phase runs out: the same step, up to rounding, with every completion, and the record says so."""
    real, lines = models.load, []
    for small in (False, True):
        def load(*args, **kwargs):
            policy = real(*args, **kwargs)
            if small:
                small_device(policy.model if phase != "attribution" or method not in ("oar_t", "oar_tg") else policy.model.base_model, 3, phase)
            return policy

        monkeypatch.setattr(models, "load", load)
        sys.argv = ["train.py", *f"--steps 1 --prompts-per-step 2 --group-size 4 --max-new-tokens 72 --validation-size 0 --device cpu --quiet "
                    f"--method {method} --out {tmp_path / str(small)}".split()]
        train.main()
        lines.append(checkpoint.read_records(tmp_path / str(small) / "metrics.jsonl")[0])
    whole, halved = lines
    assert whole["memory_halvings"] == 0 and halved["memory_halvings"] >= 1
    assert re.search(f"{phase}: out of memory with \\d rows at once; going on with \\d", capsys.readouterr().err)
    for name in ("reward", "length", "entropy", "ess_ratio", "top10_mass", "grad_norm"):
        assert halved[name] == pytest.approx(whole[name], rel=1e-2), name
    first, second = (real(str(tmp_path / name), torch.device("cpu")).model.state_dict() for name in ("False", "True"))
    assert all((first[name] - second[name]).abs().max() < 2.1e-4 for name in first)  # one step of Adam moves a weight by at most lr
