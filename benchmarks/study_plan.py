"""What the study runs: settings of the lab, variants of the method, and the order of the runs.

Chosen with GRPO alone (python -m benchmarks.study --choose; benchmarks/results/study_choice.json), before any other method
was run.  The rule: on 8 seeds that the study does not use, split each run into thirds.  A learning rate qualifies at a
number of steps when on every seed the mean reward of the last third is at least 0.1 above the first's and no third lies
more than NOISE below the one before (steady), and the mean over seeds of the last third is at least 0.3 (not hopeless) and
at most 0.95 (not finished).  Start from the setting's `steps`; while nothing qualifies, take 20 fewer.  Of the rates that
qualify, the one with the highest mean reward is GRPO's best, and every method gets it.  The main setting tries
LEARNING_RATES, the others keep their rate and choose their steps.  `target` is the mean reward over seeds of the middle third,
to the next 0.05: what "steps to a fixed reward" counts to.

Beyond main, long6 and small qualify.  long8 (steady on 7 of 8 seeds) and nuisance (4 of 8; GRPO gains .08 from the first
third to the last) run their 60 steps all the same.  Two first tries in which GRPO learnt nothing are kept in the JSON: nuisance
with a carelessness of .35 (it starts at .06), and small after 1000 warm-start steps (at .02).

What was known when the rule was written: GRPO on the first of the 8 seeds.  In 100 steps at 5e-5 and 1e-4 its reward stood
still after 40 to 60, hence 60 steps; and a third of 20 steps (80 problems) has a standard error of about 0.03, hence NOISE.
So the rule was applied once more, as it stood, to 8 fresh seeds and with 2e-4 besides: there 1e-4 has the highest mean reward
too, but is steady on 7 of 8 seeds only, and 5e-5 is chosen; 2e-4 is worse for GRPO.  In nuisance and long8 5e-5, tried
after the methods had run at 1e-4, makes GRPO steady on 8 of 8.  The settings with a rate in their name are those choices.
"""
from fnmatch import fnmatchcase
from typing import NamedTuple

from oar import lab
from oar.errors import UserError

LEARNING_RATES = (1e-4, 5e-5, 2e-5)
CHOICE_SEEDS = range(1000, 1008)
STEPS_AT_LEAST = 40
NOISE = 0.04         # standard error of the difference of two thirds' mean rewards

METHODS = ("grpo", "random", "entropy", "entropy_bonus", "ktae", "oar_g", "oar_f", "oar_p", "oar_t", "oar_tg", "roles", "inverted")
MOST = tuple(method for method in METHODS if method not in ("oar_f", "oar_t", "inverted"))        # of main_5e-5
FEW = ("grpo", "oar_p", "oar_g", "roles")                                                        # of the settings beyond


class Setting(NamedTuple):
    """A lab problem size, its warm-start policy and the training run on it; lengths are in tokens."""
    instructions: int = lab.INSTRUCTIONS
    fillers: int = lab.FILLERS
    sloppiness: float = lab.SLOPPINESS
    hidden: int = 128
    warm_steps: int = 1000
    prompts_per_step: int = 4
    group_size: int = 4
    steps: int = 60
    lr: float = 1e-4
    target: float = 0.8
    seeds: int = 8
    methods: tuple[str, ...] = FEW

    @property
    def max_new_tokens(self) -> int:
        """A tenth more than a well-formed completion has: per instruction its fillers and 8 tokens, then #### x y <eos>."""
        return round(1.1 * (self.instructions * (self.fillers + 8) + 4))


NUISANCE = Setting(fillers=16, sloppiness=0.25, prompts_per_step=8, group_size=2, target=0.4)         # mostly filler, small groups, rarer success
SETTINGS = {
    "main": Setting(seeds=16, methods=METHODS),
    "main_5e-5": Setting(lr=5e-5, target=0.75, seeds=16, methods=MOST),
    "nuisance": NUISANCE,
    "nuisance_5e-5": NUISANCE._replace(lr=5e-5, target=0.5),
    "small": Setting(hidden=64, warm_steps=3000, target=0.6),                                          # a quarter of the parameters
    "long6": Setting(instructions=6, target=0.7),
    "long8": Setting(instructions=8, target=0.6),
    "long8_5e-5": Setting(instructions=8, lr=5e-5, target=0.6),
}


def ablation(*methods: str, **change) -> dict[str, dict]:
    """{"oar_g gate=boost_only": settings of train.Config, ...} for each method."""
    label = ", ".join(f"{name}={value}" for name, value in change.items())
    return {f"{method} {label}": dict(method=method, **change) for method in methods}


# Ablations run in the main setting.  Those of the gate's numbers use oar_tg, the cheap method whose scores find most roles;
# those of the threshold also the known roles, since a quarter of the tokens is fewer than the lab's fillers are (their scores
# are 0 or 1 and over half are 0, so that a threshold below .75 changes nothing).  A boost of 0 is gate=suppress_only.
ABLATIONS = {
    **ablation("oar_g", "oar_tg", gate="boost_only"), **ablation("oar_g", "oar_tg", gate="suppress_only"),
    **ablation("oar_g", "oar_tg", renormalise=False), **ablation("oar_g", "oar_tg", gate="boost_only", renormalise=False),
    **{name: change for threshold in (0.1, 0.5, 0.75, 0.9) for name, change in ablation("oar_tg", threshold=threshold).items()},
    **{name: change for threshold in (0.75, 0.9) for name, change in ablation("roles", threshold=threshold).items()},
    **{name: change for boost in (0.5, 2.0, 4.0) for name, change in ablation("oar_tg", boost=boost).items()},
    **{name: change for floor in (0.0, 0.5) for name, change in ablation("oar_tg", floor=floor).items()},
    **ablation("oar_g", probe="last"), **ablation("oar_g", probe="answer_joint"),
    **ablation("oar_g", noise_draws=4), **ablation("oar_g", noise_draws=16),
    **ablation("grpo", "entropy_bonus", "ktae", loss_norm="constant"),
    **ablation("oar_p", perturb="resample"), **ablation("oar_p", perturb="other"),
    **ablation("oar_p", probe="last"), **ablation("oar_p", probe="answer_joint"),
    **ablation("oar_p", gate="boost_only"), **ablation("oar_p", gate="suppress_only"), **ablation("oar_p", renormalise=False),
}
VARIANTS = {method: dict(method=method) for method in METHODS} | ABLATIONS


class Job(NamedTuple):
    """One training run."""
    setting: str
    variant: str
    seed: int


def jobs(settings: list[str], patterns: list[str], seeds: list[int] | None) -> list[Job]:
    """All runs in order: the methods in the main setting, seed by seed, then the other settings, then the ablations.

    `settings` and `patterns` (shell style, of variant names) select; `seeds` replaces each setting's own.  UserError for
    a setting that does not exist or a selection that is empty.
    """
    unknown = [name for name in settings if name not in SETTINGS]
    if unknown:
        raise UserError(f"--settings {unknown[0]}: no such setting (there are: {', '.join(SETTINGS)})")
    blocks = [(name, setting.methods, setting.seeds) for name, setting in SETTINGS.items()]
    blocks.append(("main", ABLATIONS, Setting().seeds))
    plan = [Job(name, variant, seed) for name, variants, count in blocks if not settings or name in settings
            for seed in (range(count) if seeds is None else seeds) for variant in variants
            if not patterns or any(fnmatchcase(variant, pattern) for pattern in patterns)]
    if not plan:
        raise UserError(f"--variants {' '.join(patterns)}: nothing matches (there are: {', '.join(VARIANTS)})")
    return plan


def shard_of(job: Job, shards: int) -> int:
    """Which of `shards` processes does a job: seeds take turns, so that each process gets every variant."""
    return (job.seed + list(VARIANTS).index(job.variant)) % shards
