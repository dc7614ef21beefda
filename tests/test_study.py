"""The study: its plan, the choosing rule, one tiny run and resuming, the numbers, intervals, verdicts, and the README's table."""
import json
import random
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT

from benchmarks import length_scale, study, study_claims, study_figures, study_report, variance
from benchmarks.study_plan import METHODS, SETTINGS, VARIANTS, Job, Setting, jobs, shard_of
from oar import lab
from oar.config import PRESETS
from oar.credit import METHODS as KNOWN
from oar.errors import UserError


def fake(variant, seed, reward, setting="main", sampled=0.5):
    """A record as `study.run` leaves it."""
    curves = {name: [0.5] * len(reward) for name in study.CURVES} | {"reward": reward, "ess_ratio": [None] + [0.8] * (len(reward) - 1)}
    return {"setting": setting, "variant": variant, "seed": seed, "before": {}, "after": {"validation_greedy": 0.9, "validation_sampled": sampled},
            "curves": curves, "config": {}, "commit": "abc", "seconds": 36.0, "versions": {"torch": "2"}}


# --------------------------------------------------------------------------------------------------------------------
# plan

def test_plan_order_and_selection():
    assert set(METHODS) == set(KNOWN)
    plan = jobs([], [], None)
    assert len(plan) == len(set(plan)) and plan[:len(METHODS)] == [Job("main", m, 0) for m in METHODS]       # all methods of seed 0 first
    assert {j.seed for j in plan if j.setting == "main" and j.variant in METHODS} == set(range(16))
    assert jobs(["main"], ["grpo", "oar_g"], [0, 5]) == [Job("main", m, s) for s in (0, 5) for m in ("grpo", "oar_g")]
    assert {j.variant for j in jobs(["small"], [], None)} == {"grpo", "oar_p", "oar_g", "roles"}
    assert {j.variant for j in jobs(["main"], ["oar_tg threshold*"], [0])} == {f"oar_tg threshold={t}" for t in (0.1, 0.5, 0.75, 0.9)}
    for settings, patterns, match in ((["mian"], [], "no such setting"), ([], ["oar_x*"], "nothing matches")):
        with pytest.raises(UserError, match=match):
            jobs(settings, patterns, None)


def test_shards_are_a_partition_and_share_the_dear_methods():
    plan = jobs([], [], None)
    for method in ("grpo", "oar_t"):
        counts = [sum(shard_of(j, 2) == k for j in plan if j.variant == method and j.setting == "main") for k in (0, 1)]
        assert counts == [8, 8]
    assert study.parse_shard("1/3") == (1, 3)
    for bad in ("2/2", "x", "1", "-1/2", "0/0"):
        with pytest.raises(UserError, match="--shard"):
            study.parse_shard(bad)


def test_variants_are_settings_that_train_takes():
    for name in VARIANTS:
        config = study.configure(Job("main", name, 3), SETTINGS["main"], "lab")
        assert config.seed == 3 and config.method == name.split(" ")[0] and config.lr == SETTINGS["main"].lr
    assert len({study.path_of(study.RUNS, Job("main", name, 0)) for name in VARIANTS}) == len(VARIANTS)


def test_room_for_a_whole_completion():
    for setting in SETTINGS.values():
        problem = lab.random_problem(random.Random(0), setting.instructions)
        words = lab.write_trace(problem, random.Random(0), setting.fillers).split()
        assert len(words) < setting.max_new_tokens < 1.2 * len(words)


def test_setting_matches_the_recorded_choice():
    if not study.CHOICE.exists():
        pytest.skip("no choice recorded")
    again = {"main, lr 0.0002 0.0001 5e-05 2e-05, seeds 1008 to 1015": "main_5e-5", "nuisance, lr 5e-05 2e-05": "nuisance_5e-5",
             "long8, lr 5e-05": "long8_5e-5"}
    choices = json.loads(study.CHOICE.read_text())
    assert set(again) <= set(choices)
    for name, entry in choices.items():
        setting = SETTINGS.get(again.get(name, name))
        if entry["chosen"] and setting:
            assert {"steps": setting.steps, "lr": setting.lr, "target": setting.target} == entry["chosen"], name


# --------------------------------------------------------------------------------------------------------------------
# choosing

def test_judge_wants_every_seed_to_improve():
    rising = [0.2] * 20 + [0.4] * 20 + [0.6] * 20
    verdict = study.judge([rising, rising], 60)
    assert verdict["qualifies"] and verdict["thirds"] == pytest.approx([0.2, 0.4, 0.6]) and verdict["mean"] == pytest.approx(0.4)
    dip, wobble = ([0.2] * 20 + [0.6] * 20 + [last] * 20 for last in (0.5, 0.57))
    assert study.judge([rising, wobble], 60)["qualifies"]                            # within the noise of a third
    assert study.judge([rising, dip], 60) | {"mean": 0, "thirds": 0} == {"steps": 60, "mean": 0, "thirds": 0, "steady_seeds": 1, "qualifies": False}
    assert not study.judge([[0.01] * 20 + [0.1] * 20 + [0.2] * 20], 60)["qualifies"]         # hopeless
    assert not study.judge([[0.8] * 20 + [0.95] * 20 + [0.99] * 20], 60)["qualifies"]          # finished


def test_choose_takes_the_best_rate_that_qualifies(tmp_path, monkeypatch, capsys):
    def run_once(out, job, setting, lr):
        top = {2e-5: 0.45, 5e-5: 0.7, 1e-4: 0.9}[lr]
        last = 0.5 if lr == 1e-4 and job.seed == 1003 else top                       # one seed of the fastest rate falls back
        return fake("grpo", job.seed, [0.3] * 20 + [0.35 if top == 0.45 else 0.6] * 20 + [last] * 20) | {"before": {"validation_greedy": 1.0}}
    monkeypatch.setattr(study, "run_once", run_once)
    monkeypatch.setattr(study, "CHOICE", tmp_path / "choice.json")
    monkeypatch.setattr(study, "SETTINGS", {"main": Setting()})
    study.choose("main", tmp_path, 0, 1)
    entry = json.loads((tmp_path / "choice.json").read_text())["main"]
    assert entry["chosen"] == {"steps": 60, "lr": 5e-5, "target": 0.6} and "| 5e-05 | 60 |" in capsys.readouterr().out
    assert [row["steps"] for row in entry["rates"]["5e-05"]] == [60, 40]
    study.choose("main", tmp_path, 0, 1, seeds=[1003, 1004], rates=[1e-4])           # other seeds and rates: an entry of its own beside it
    entries = json.loads((tmp_path / "choice.json").read_text())
    other = entries["main, lr 0.0001, seeds 1003 to 1004"]
    assert entries["main"] == entry and other["chosen"] == {"steps": 40, "lr": 1e-4, "target": 0.45}
    assert [row["steady_seeds"] for row in other["rates"]["0.0001"]] == [1, 2]


def test_rates_are_for_choosing_only(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["study", "--settings", "main", "--rates", "1e-5"])
    with pytest.raises(UserError, match="--rates goes with --choose"):
        study.main()


# --------------------------------------------------------------------------------------------------------------------
# a real run, small

def test_run_is_paired_resumable_and_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(study.SETTINGS, "main", Setting(steps=2, prompts_per_step=2, methods=METHODS))
    monkeypatch.setitem(PRESETS["lab"], "validation_size", 4)
    threads = torch.get_num_threads()
    argv = ["study", "--out", str(tmp_path), "--settings", "main", "--variants", "grpo", "random", "--seeds", "7"]
    try:
        monkeypatch.setattr(sys, "argv", argv)
        study.main()
        files = sorted(p.name for p in (tmp_path / "main").iterdir())
        assert files == ["grpo-7.json", "random-7.json"]
        grpo, other = (json.loads((tmp_path / "main" / name).read_text()) for name in files)
        assert grpo["curves"]["reward"][0] == other["curves"]["reward"][0]          # the same problems, policy and uniforms at step 1
        assert grpo["curves"]["ess_ratio"] != other["curves"]["ess_ratio"]
        assert all(len(curve) == 2 for curve in grpo["curves"].values()) and set(grpo["after"]) == {"validation_greedy", "validation_sampled"}
        assert grpo["config"]["method"] == "grpo" and grpo["versions"]["torch"] == torch.__version__
        before = (tmp_path / "main" / "grpo-7.json").read_text()
        study.main()                                                                 # nothing is left to do
        assert (tmp_path / "main" / "grpo-7.json").read_text() == before and "2 of them finished already" in capsys.readouterr().out
        assert study.run(Job("main", "grpo", 7), study.configure(Job("main", "grpo", 7), study.SETTINGS["main"], "lab"))["curves"] == grpo["curves"]
    finally:
        torch.set_num_threads(threads)


def test_warm_start_is_built_once(tmp_path, monkeypatch):
    built = []
    def rebuild(folder, *settings, **more):
        folder.mkdir(parents=True)
        built.append(settings)
    monkeypatch.setattr(study.lab, "rebuild", rebuild)
    assert study.warm_start(SETTINGS["main"], tmp_path) == "lab" and not built          # the lab's own policy fits
    folders = {study.warm_start(SETTINGS[name], tmp_path) for name in ("long8", "long8_5e-5")}
    assert folders == {str(tmp_path / "warm_starts" / "long8")} and built == [(8, lab.FILLERS, lab.SLOPPINESS, 1000, 128)]
    assert [p.name for p in (tmp_path / "warm_starts").iterdir()] == ["long8"]


def test_failed_run_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def run(job, config):
        if job.variant == "grpo":
            raise RuntimeError("boom\nsecond line")
        return fake(job.variant, job.seed, [0.5] * 20)
    monkeypatch.setattr(study, "run", run)
    monkeypatch.setattr(sys, "argv", ["study", "--out", str(tmp_path), "--settings", "main", "--variants", "grpo", "oar_g", "--seeds", "0"])
    with pytest.raises(UserError, match="1 of 2 runs failed"):
        study.main()
    assert (tmp_path / "main" / "oar_g-0.json").exists() and not (tmp_path / "main" / "grpo-0.json").exists()


# --------------------------------------------------------------------------------------------------------------------
# numbers and report

def test_smooth_skips_missing_steps():
    assert study_report.smooth([1.0, None, 3.0]).tolist() == [1, 1, 2]
    assert study_report.smooth([float(i) for i in range(20)])[-1] == 14.5            # mean of 10..19
    assert np.isnan(study_report.smooth([None, 1.0])[0])


def test_numbers_by_hand():
    n = study_report.numbers(fake("grpo", 0, [0.0] * 10 + [1.0] * 10 + [0.5] * 10), target=0.6)
    assert n["mean_reward"] == pytest.approx(0.5) and n["drawdown"] == pytest.approx(0.5) and n["collapsed"] == 0
    assert n["steps_to_target"] == 16                                                # six of the last ten rewards are 1
    assert n["ess_ratio"] == pytest.approx(0.8) and n["sampled"] == 0.5
    falling = study_report.numbers(fake("grpo", 0, [1.0] * 10 + [0.0] * 10), target=1.1)
    assert falling["steps_to_target"] == 21 and falling["collapsed"] == 1 and falling["drawdown"] == 1


def test_interval_needs_seeds_and_holds_the_mean():
    assert study_claims.interval([]) == [None, None, None] and study_claims.interval(range(1, 8)) == [4.0, None, None]
    mean, low, high = study_claims.interval(range(1, 9))
    assert mean == 4.5 and 1 <= low < 4.5 < high <= 8
    assert study_claims.interval([0.5] * 9) == [0.5, 0.5, 0.5]


def test_differences_are_paired_by_seed():
    """a is always 0.1 above b although both vary; a seed that only one has is left out."""
    a = {s: {n: s + 0.1 for n in study_report.COLUMNS} for s in range(9)}
    b = {s: {n: float(s) for n in study_report.COLUMNS} for s in range(1, 12)}
    difference = study_report.paired(a, b)
    assert difference["seeds"] == 8 and difference["mean_reward"] == [0.1, 0.1, 0.1]
    assert study_report.paired(a, {}) is None


@pytest.mark.parametrize("value, side, bound, verdict", [
    ([0.1, 0.05, 0.2], ">", 0, "holds"), ([0.1, 0.05, 0.2], "<", 0, "does not hold"), ([0.1, -0.05, 0.2], ">", 0, "undecided"),
    ([-0.1, -0.2, -0.05], "<", 0, "holds"), ([0.004, -0.001, 0.009], "<", 0.01, "holds"), (None, ">", 0, "not measured")])
def test_verdicts(value, side, bound, verdict):
    assert study_claims.decide(value, side, bound) == verdict


def test_a_claim_is_as_good_as_its_weakest_part():
    assert study_claims.together(["holds", "holds"]) == "holds" and study_claims.together(["holds", "undecided"]) == "undecided"
    assert study_claims.together(["undecided", "not measured"]) == "not measured" and study_claims.together(["holds", "does not hold"]) == "does not hold"


def test_report_from_partial_results(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    for variant, gain, seeds in (("grpo", 0, 9), ("oar_p", 0.1, 8), ("roles", 0.2, 2), ("oar_tg", 0.1, 8), ("oar_tg threshold=0.9", -0.1, 8)):
        for seed in range(seeds):
            record = fake(variant, seed, np.clip(0.3 + gain + 0.001 * seed + rng.normal(0, 0.001, 40), 0, 1).tolist())
            path = study.path_of(tmp_path, Job("main", variant, seed))
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(record))
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{study_claims.START}\nstale\n{study_claims.END}\nafter\n")
    for name, value in (("RESULT", "study.json"), ("VARIANCE", "none.json"), ("LENGTHS", "none.json"), ("README", "README.md"), ("DOCS", "")):
        monkeypatch.setattr(study_report, name, tmp_path / value)
    study_report.main(tmp_path)
    summary = json.loads((tmp_path / "study.json").read_text())
    rows = summary["settings"]["main"]["rows"]
    assert summary["runs"] == 35 and rows["oar_p"]["to_grpo"]["seeds"] == 8 and rows["oar_p"]["to_grpo"]["mean_reward"][0] == pytest.approx(0.1, abs=0.002)
    assert rows["oar_tg threshold=0.9"]["to_own"]["mean_reward"][0] == pytest.approx(-0.2, abs=0.002)
    verdicts = {c["claim"]: c["verdict"] for c in summary["claims"]}
    assert verdicts["OAR-P learns faster than GRPO"] == "holds" and verdicts["Credit on the pivotal tokens helps at all (the known roles against GRPO)"] == "not measured"
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "stale" not in text and study_claims.table(summary["claims"]) in text
    assert study_claims.put_into(text, study_claims.table(summary["claims"])) == text and study_claims.put_into("plain", "x") == "plain"
    assert (tmp_path / "study_curves.png").read_bytes()[:4] == (tmp_path / "study_settings.png").read_bytes()[:4] == b"\x89PNG"
    assert "| `oar_p` | 8 |" in capsys.readouterr().out


def test_report_without_runs_says_so(tmp_path):
    with pytest.raises(UserError, match="no finished run"):
        study_report.main(tmp_path)


def test_readme_matches_the_results():
    if not study_report.RESULT.exists():
        pytest.skip("the study has not been reported yet")
    claims = json.loads(study_report.RESULT.read_text())["claims"]
    assert study_claims.table(claims) in (ROOT / "README.md").read_text(encoding="utf-8")
    for part in (p for c in claims for p in c["parts"]):
        assert part["verdict"] == study_claims.decide(part["value"], part["side"], part["bound"])
    assert [c["claim"] for c in claims] == list(study_claims.CLAIMS)


def test_every_claim_names_rows_that_are_run():
    for part in (p for parts in study_claims.CLAIMS.values() for p in parts if p["source"] == "training"):
        variants = {j.variant for j in jobs([part["setting"]], [], None)}
        assert set(part["rows"]) <= variants and part["number"] in study_report.COLUMNS, part
    assert set(study_figures.COLOURS) == set(METHODS)


# --------------------------------------------------------------------------------------------------------------------
# variance

def test_filler_weights_by_hand():
    filler, mask = torch.tensor([[True, True, False, False, False]]), torch.tensor([[True, True, True, True, False]])
    assert variance.weigh_fillers(filler, mask, 0.5, False).tolist() == [[0.5, 0.5, 1, 1, 0]]
    assert variance.weigh_fillers(filler, mask, 0.5, True).tolist() == [[0.5, 0.5, 1.5, 1.5, 0]]


def test_summary_of_known_gradients():
    noise = torch.tensor([0.5, -0.5, 0.4, -0.4, 0.3, -0.3, 0.2, -0.2])
    g = torch.stack([torch.ones(8), noise], 1)                                       # signal 1, variance that of the noise

    def table(scale):
        h = scale * g
        return {"own": (h @ h.T).double(), "grpo": (h @ g.T).double(), "filler": (h @ h.T).double(), "mass": 0.0}
    rows = variance.summarise({"grpo": table(1), "half": table(0.5)})
    assert rows["half"]["variance_ratio"] == [0.25, 0.25, 0.25] and rows["half"]["noise_ratio"] == [1, 1, 1] and rows["half"]["filler_share"][0] == 1
    spread = noise.var().item()
    assert rows["grpo"]["noise"][0] == pytest.approx(spread / (1 - spread / 8), rel=1e-3) and rows["grpo"]["noise"][1] < rows["grpo"]["noise"][2]
    assert rows["half"]["cosine_grpo_gain"] == [0, 0, 0] and rows["grpo"]["cosine_own"][0] == rows["half"]["cosine_own"][0]


def test_growth_by_hand():
    assert length_scale.growth(np.array([1.0, 1.0]), np.array([3.0, 3.0, 3.0])) == [2.0, 2.0, 2.0]


def test_variance_on_the_lab():
    """Two steps: ESS and top-10 % mass are the methods', weights that sum to n add no mass, and the filler part scales as w^2."""
    policy, config = variance.prepare("main", 0)
    tables = variance.measure(policy, config, ["grpo", "roles", "entropy_bonus"], 2)
    assert tables["grpo"]["ess"] == pytest.approx(1) and tables["roles"]["ess"] < 1 and abs(tables["roles"]["mass"]) < 1e-3 < tables["entropy_bonus"]["mass"]
    assert torch.allclose(tables["filler w=0.5, kept"]["filler"], 0.25 * tables["grpo"]["filler"], rtol=1e-3, atol=1e-9)
    assert torch.allclose(tables["grpo"]["own"], tables["grpo"]["grpo"])


def test_runs_that_choose_stay_apart_from_the_study(tmp_path):
    job = Job("small", "grpo", 1000)
    assert study.path_of(tmp_path, job, 1e-4).parent == tmp_path / "choice" / "small" and study.path_of(tmp_path, job).parent == tmp_path / "small"
