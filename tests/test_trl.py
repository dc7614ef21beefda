"""OARTrainer: TRL's own step where nothing is reshaped, train.py's credit where something is, LoRA and several processes."""
import copy
import json
import os
import random
import runpy
import socket
import subprocess
import sys

import pytest
import torch
from conftest import EOS_ID, ROOT, make_batch, tiny_model

pytest.importorskip("trl", reason="TRL is not installed (requirements-dev.txt)")

from datasets import Dataset                                       # noqa: E402
from trl import GRPOConfig, GRPOTrainer                            # noqa: E402

from oar import grpo, lab                                          # noqa: E402
from oar.batch import random_stream                                # noqa: E402
from oar.credit import CreditConfig, assign_credit                 # noqa: E402
from oar.errors import UserError                                   # noqa: E402
from oar.models import Policy                                      # noqa: E402
from oar.trl import OARConfig, OARTrainer                          # noqa: E402

G, PROMPTS = 4, 2
LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")


def written(problem: str, sample: int) -> str:
    """A fixed completion of a problem: traces of several lengths, one of them cut before its answer."""
    rng = random.Random(f"{problem}-{sample}")
    trace = lab.write_trace(lab.parse_problem(problem), rng, fillers=sample, sloppiness=0.5)
    return trace.split(" ####")[0] if sample == 2 else trace


def reward(completions, **_):
    return [float(len(text) % 3) for text in completions]


def fixed_rollout(prompts, trainer):
    """Completions that depend on the prompt and the row's number over all processes, not on random numbers."""
    tokenizer, first = trainer.processing_class, trainer.accelerator.process_index * len(prompts)
    ids = [tokenizer.encode(written(prompt, (first + i) % G)) for i, prompt in enumerate(prompts)]
    prompt_ids = [tokenizer.encode(prompt) for prompt in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": [[0.0] * len(x) for x in ids]}


def make_trainer(folder, kind=OARTrainer, model=None, peft_config=None, rollout=fixed_rollout, **settings):
    rng = random.Random(0)
    problems = [lab.random_problem(rng, 2).text() for _ in range(4 * PROMPTS)]
    fixed = dict(output_dir=str(folder), per_device_train_batch_size=G * PROMPTS, num_generations=G, max_completion_length=40,
                 max_steps=2, learning_rate=1e-2, optim="sgd", seed=3, bf16=False, use_cpu=True, gradient_checkpointing=False,
                 report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True)
    args = (OARConfig if kind is OARTrainer else GRPOConfig)(**{**fixed, **settings})
    return kind(model or tiny_model("llama"), reward, args, train_dataset=Dataset.from_list([{"prompt": p} for p in problems]),
                processing_class=lab.build_tokenizer(), peft_config=peft_config, rollout_func=rollout)


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def watch(trainer):
    """Every rollout that the trainer makes, as (state of the model, output), and every slice that its loss sees."""
    rollouts, slices, make, loss = [], [], trainer._generate_and_score_completions, trainer._compute_loss

    def made(inputs):
        rollouts.append((copy.deepcopy(trainer.model.state_dict()), make(inputs)))
        return rollouts[-1][1]

    def seen(model, inputs):
        slices.append(inputs)
        return loss(model, inputs)

    trainer._generate_and_score_completions, trainer._compute_loss = made, seen
    trainer.train()
    return rollouts, slices


def expected(model, output, step, **settings):
    """Token advantages as train.py makes them for TRL's completions: rewards -> group_advantages -> assign_credit."""
    tokenizer = lab.build_tokenizer()
    row = (lambda name, i: output[f"{name}_ids"][i][output[f"{name}_mask"][i].bool()].tolist())
    rows = range(len(output["prompt_ids"]))
    batch = make_batch(*[[row(name, i) for i in rows] for name in ("prompt", "completion")], tokenizer)
    rewards = torch.tensor(reward(tokenizer.batch_decode(output["completion_ids"], skip_special_tokens=True)))
    advantages = grpo.group_advantages(rewards, G)
    config = CreditConfig(**settings)
    return assign_credit(Policy(model, tokenizer, (EOS_ID,), True), batch, rewards, advantages, config, G, 1.0,
                         random_stream(3, step, 0, "attribution"), 8192).token_advantages


# --------------------------------------------------------------------------------------------------------------------
# TRL's own step

@pytest.mark.parametrize("settings", [dict(method="grpo"), dict(method="oar_p", gate="boost_only", boost=0.0)])
def test_nothing_reshaped_is_trl_to_the_bit(tmp_path, settings):
    sampled = dict(rollout=None, max_completion_length=12, num_iterations=2, gradient_accumulation_steps=2,
                   per_device_train_batch_size=G, max_steps=4)                       # two rollouts of TRL's own sampler
    plain = make_trainer(tmp_path, GRPOTrainer, **sampled)
    plain.train()
    ours = make_trainer(tmp_path, **sampled, **settings)                             # a trainer seeds the global generator
    ours.train()
    assert all(torch.equal(value, weights(ours)[name]) for name, value in weights(plain).items())
    assert all(not torch.equal(value, weights(plain)[name]) for name, value in tiny_model("llama").named_parameters())
    logs = [[[log.get(key) for key in ("loss", "grad_norm", "entropy")] for log in t.state.log_history] for t in (plain, ours)]
    assert logs[0] == logs[1] and any(logs[0][0])


def test_every_loss_takes_token_advantages(tmp_path):
    """Constant rows give what TRL gives for one number per completion; a weight of 2 on a row gives twice its gradient."""
    trainer = make_trainer(tmp_path, GRPOTrainer, max_steps=1)
    (_, output), = watch(trainer)[0]
    constant = output["advantages"][:, None].expand(output["completion_ids"].shape).contiguous()
    for trainer.loss_type in LOSSES:
        one, two = (trainer._compute_loss(trainer.model, {**output, "advantages": a}) for a in (output["advantages"], constant))
        assert torch.equal(one, two), trainer.loss_type


def test_weights_cancel_under_sequence_ratios(tmp_path):
    """Weights that sum to the number of tokens leave GSPO's gradient as it is, which is why OARConfig refuses them."""
    trainer = make_trainer(tmp_path, method="oar_p", max_steps=1, loss_type="grpo")
    (_, output), = watch(trainer)[0]
    flat = (output["advantages"] * output["completion_mask"]).sum(1) / output["completion_mask"].sum(1)
    gradients = {}
    for level in ("sequence", "token"):
        trainer.importance_sampling_level = level
        for name, advantages in (("weighted", output["advantages"]), ("flat", flat)):
            loss = trainer._compute_loss(trainer.model, {**output, "advantages": advantages})
            gradients[level, name] = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(trainer.model.parameters()))])
    scale = gradients["sequence", "flat"].abs().max()
    assert torch.allclose(gradients["sequence", "weighted"], gradients["sequence", "flat"], atol=1e-5 * scale)
    assert not torch.allclose(gradients["token", "weighted"], gradients["token", "flat"], atol=1e-2 * scale)


# --------------------------------------------------------------------------------------------------------------------
# train.py's credit

@pytest.mark.parametrize("method", ["oar_g", "oar_p", "oar_f", "oar_tg", "ktae"])
def test_advantages_are_those_of_train_py(tmp_path, method):
    trainer = make_trainer(tmp_path, method=method, probe="last")
    rollouts, _ = watch(trainer)
    assert len(rollouts) == 2
    for step, (state, output) in enumerate(rollouts):
        model = tiny_model("llama")
        model.load_state_dict(state)
        want = expected(model, output, step, method=method, probe="last")
        assert output["advantages"].shape == output["completion_ids"].shape
        assert torch.allclose(output["advantages"], want, atol=1e-4) and want.abs().sum() > 0
        assert (output["advantages"].std(1) > 0).any()
    assert any("oar/ess_ratio" in log for log in trainer.state.log_history)


def test_oar_g_scores_in_float32_under_mixed_precision(tmp_path):
    """bf16 training wraps the model's forward in autocast; OAR-G must not see it."""
    (state, output), = watch(make_trainer(tmp_path, method="oar_g", bf16=True, max_steps=1))[0]
    model = tiny_model("llama")
    model.load_state_dict(state)
    assert torch.allclose(output["advantages"], expected(model, output, 0, method="oar_g"), atol=1e-4)


def test_entropy_is_that_of_the_training_model(tmp_path):
    (_, output), = watch(make_trainer(tmp_path, method="entropy", max_steps=1))[0]
    assert output["advantages"].isfinite().all() and (output["advantages"].std(1) > 0).any()


def test_slices_carry_their_token_advantages(tmp_path):
    """Accumulation and several iterations shuffle and split the rollout: every row keeps its own advantages."""
    trainer = make_trainer(tmp_path, method="oar_p", per_device_train_batch_size=G, gradient_accumulation_steps=2,
                           num_iterations=2)
    rollouts, slices = watch(trainer)
    assert len(rollouts) == 1 and len(slices) == 4                                   # 2 steps x 2 slices, one rollout
    (_, whole), seen = rollouts[0], 0
    for part in slices:
        for ids, advantages in zip(part["completion_ids"], part["advantages"]):
            row = (whole["completion_ids"] == ids).all(1) & (whole["advantages"] == advantages).all(1)
            seen += row.any().item()
    assert seen == 4 * G


def test_truncated_and_tool_tokens_get_no_weight(tmp_path):
    """mask_truncated_completions empties a completion; a tool's tokens (env_mask 0) are read but not weighted."""
    def with_tool(prompts, trainer):
        rollout = fixed_rollout(prompts, trainer)
        return {**rollout, "env_mask": [[int(not 2 <= t < 6) for t in range(len(ids))] for ids in rollout["completion_ids"]]}

    (_, output), = watch(make_trainer(tmp_path, method="oar_p", max_steps=1, rollout=with_tool))[0]
    own = output["completion_mask"].bool() & output["tool_mask"].bool()
    sums, sizes = (output["advantages"] * own).sum(1), own.sum(1)
    assert torch.allclose(sums, output["advantages"][:, 2] * sizes, atol=1e-3)       # a tool token shows A_i itself
    (_, output), = watch(make_trainer(tmp_path, method="oar_p", max_steps=1, mask_truncated_completions=True))[0]
    assert (output["completion_mask"].sum(1) == 0).any() and output["advantages"].isfinite().all()


# --------------------------------------------------------------------------------------------------------------------
# LoRA

@pytest.mark.parametrize("method", ["oar_g", "oar_p", "oar_tg"])
def test_adapters_are_scored_saved_and_reloaded(tmp_path, method):
    peft = pytest.importorskip("peft", reason="peft is not installed (requirements-dev.txt)")
    trainer = make_trainer(tmp_path, method=method, learning_rate=1.0, bf16=method == "oar_g",
                           peft_config=peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"]))
    rollouts, _ = watch(trainer)
    state, output = rollouts[1]                                                      # the second: the adapter is no longer zero
    trained = copy.deepcopy(trainer.model)
    trained.load_state_dict(state)
    merged = copy.deepcopy(trained).merge_and_unload()
    merged.__dict__.pop("forward", None)
    near = 1e-2                                                                      # x(W + BA) and xW + xBA round differently
    assert torch.allclose(output["advantages"], expected(merged, output, 1, method=method), atol=near)
    assert not torch.allclose(output["advantages"], expected(tiny_model("llama"), output, 1, method=method), atol=5 * near)
    trainer.save_model()
    again = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    ids = torch.arange(6, 18)[None]
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits) or method == "oar_g"
    assert all(torch.equal(value, dict(again.named_parameters())[name]) for name, value in trainer.model.named_parameters())


# --------------------------------------------------------------------------------------------------------------------
# several processes

def launch(script: str, *argv, processes: int) -> None:
    """`accelerate launch` without a GPU: torchrun underneath, gloo between the processes (with --cpu it would start only one)."""
    several = ["--multi_gpu", "--main_process_port", str(free_port())] if processes > 1 else []
    command = [sys.executable, "-m", "accelerate.commands.launch", *several, "--num_processes", str(processes),
               "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
               str(ROOT / "tests" / script), *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stderr[-2000:]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("method", ["grpo", "oar_p"])
def test_two_processes_are_one_with_the_doubled_batch(tmp_path, method):
    for processes in (1, 2):
        launch("trl_processes.py", method, G * PROMPTS // processes, tmp_path / f"{processes}.pt", processes=processes)
    one, two = (torch.load(tmp_path / f"{n}.pt") for n in (1, 2))
    start = tiny_model("llama").state_dict()
    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in one)
    assert all(not torch.allclose(one[name], start[name], atol=1e-5) for name in one)


def test_sharded_processes_attribute_unequal_work(tmp_path):
    """FSDP2: one process scores three completions, the other none; the scores are those of the whole model."""
    launch("fsdp_processes.py", processes=2)


# --------------------------------------------------------------------------------------------------------------------
# the example

def test_example_trains_an_adapter_on_a_file(tmp_path, monkeypatch):
    problems = [lab.random_problem(random.Random(seed), 2) for seed in range(4)]
    lines = [json.dumps({"problem": p.text(), "answer": lab.execute(p)[1]}) for p in problems]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines))
    flags = "--model lab --use_cpu --max_steps 1 --per_device_train_batch_size 4 --num_generations 4 --max_completion_length 80"
    monkeypatch.setattr(sys, "argv", ["grpo_trl.py", *flags.split(), "--data", str(tmp_path / "problems.jsonl"),
                                      "--lora_rank", "2", "--method", "oar_p", "--output_dir", str(tmp_path / "out")])
    runpy.run_path(str(ROOT / "examples" / "grpo_trl.py"), run_name="__main__")
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert len((ROOT / "examples" / "grpo_trl.py").read_text().splitlines()) < 60


# --------------------------------------------------------------------------------------------------------------------
# what is refused

@pytest.mark.parametrize("settings, message", [
    (dict(method="oarg"), "must be one of grpo, oar_p"), (dict(method="roles"), "known in the lab"),
    (dict(floor=2.0), "--floor must be between"),
    (dict(method="oar_p", importance_sampling_level="sequence"), "the token weights cancel"),
])
def test_impossible_settings_are_one_sentence(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        make_trainer(tmp_path, **{"gradient_accumulation_steps": 2, **settings})


def test_ktae_needs_whole_groups_on_every_process(tmp_path, monkeypatch):
    monkeypatch.setattr(OARConfig, "world_size", 2)
    with pytest.raises(UserError, match="the 2 rows that a process samples do not hold whole groups of 4"):
        make_trainer(tmp_path, method="ktae", per_device_train_batch_size=2)


def test_additive_methods_and_grpo_take_sequence_ratios(tmp_path):
    for method in ("grpo", "ktae", "entropy_bonus"):
        assert make_trainer(tmp_path, method=method, importance_sampling_level="sequence").args.method == method


def test_plain_config_is_refused(tmp_path):
    with pytest.raises(UserError, match="takes an OARConfig"):
        OARTrainer(tiny_model("llama"), reward, GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False))


def test_missing_trl_is_one_line_and_oar_does_without():
    code = "import sys; sys.modules['trl'] = None; import oar, oar.credit, train; print('fine'); import oar.trl"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "fine\n" and done.stderr.strip().splitlines()[-1].startswith("ImportError: oar.trl needs TRL")
