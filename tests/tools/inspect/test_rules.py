"""What there is to look at in a run: each rule fires on the figures that it is about, and on no others."""

from dataclasses import asdict

import pytest

from dapo.config.compose import compose
from dapo.tools.inspect.findings import Figures, findings, verdict

CONFIG = asdict(compose(["+experiment=dapo_tiny", "weight_sync.max_mean_logprob_diff=0.05"]))
STEPS = 40  # a window is 8 of them


def steady(value: float) -> dict[int, float]:
    return dict.fromkeys(range(1, STEPS + 1), value)


def changing(first: float, last: float) -> dict[int, float]:
    return {step: first if step <= STEPS // 2 else last for step in range(1, STEPS + 1)}


SOUND = {
    "rollout/accuracy": changing(0.2, 0.6),
    "rollout/truncated": steady(0.1),
    "actor/entropy": changing(0.5, 0.3),
    "actor/skipped_steps": steady(0.0),
    "buffer/drawn": steady(100.0),
    "buffer/trained": steady(60.0),
    "buffer/all_correct": steady(20.0),
    "buffer/all_wrong": steady(19.0),
    "buffer/unscorable": steady(1.0),
    "reward/failed_timeout": {3: 0.1},
    "reward/failed_cpu": steady(0.3),  # verdicts
    "reward/failed_memory": steady(0.3),
    "parity/mean_abs_logprob_diff": steady(0.02),
    "perf/step_s": steady(100.0),
    "perf/engine/idle": steady(0.25),
    "perf/update_s": steady(20.0),
    "eval/accuracy": {0: 0.3, 20: 0.55, 40: 0.5},  # no worse than the intervals allow
    "eval/accuracy_low": {0: 0.2, 20: 0.45, 40: 0.4},
    "eval/accuracy_high": {0: 0.4, 20: 0.65, 40: 0.6},
}


def found(metrics: dict[str, dict[int, float]], config: dict) -> dict[str, object]:
    return {look.rule: look for look in findings(Figures(metrics=metrics, config=config))}


def judged(metrics: dict[str, dict[int, float]]) -> str:
    run = Figures(metrics=metrics, config=CONFIG)
    return verdict(run, findings(run))[0]


def test_a_sound_run_has_nothing_to_look_at():
    assert found(SOUND, CONFIG) == {} and judged(SOUND) == "well"


DRIFT, TEACH, FALL = "actors and engines drift apart", "many groups teach nothing", "held-out accuracy falls"
FALLEN = {"eval/accuracy": {20: 0.8, 40: 0.5}, "eval/accuracy_low": {20: 0.7, 40: 0.4}}
FALLEN |= {"eval/accuracy_high": {20: 0.9, 40: 0.6}}
# The rule that fires; the figures that differ from a sound run; what is said, then the beginning of the first advice.
RULED = [
    (
        "entropy falls",
        {"actor/entropy": changing(0.5, 0.2), "rollout/accuracy": steady(0.3)},
        "60% less",
        "`algorithm.clip_ratio_high` (0.28): raise",
    ),
    (
        "truncation rises",
        {"rollout/truncated": changing(0.02, 0.1)},
        "2.0% at first",
        "`data.max_response_length` (128)",
    ),
    (
        TEACH,
        {"buffer/all_correct": steady(50), "buffer/trained": steady(30)},
        "70% of 100 groups",
        "`data.train_files`",
    ),
    (
        TEACH,
        {"buffer/all_wrong": steady(45), "buffer/trained": steady(34)},
        "45% all wrong",
        "`rollout.n` (16): the prompts are too hard",
    ),
    (TEACH, {"buffer/trained": steady(10)}, "50% overlong", "`data.max_response_length`"),
    ("verdicts are missing", {"reward/failed_crash": {1: 1.0}}, "2.8% of all", "`reward.limits.wall_s` (10.0)"),
    (DRIFT, {"parity/mean_abs_logprob_diff": steady(0.03)}, "0.03 nats", "`algorithm.rollout_correction.mode` (none)"),
    (DRIFT, {"parity/mean_abs_logprob_diff": changing(0.001, 0.006)}, "0.001 at first", "`algorithm"),
    (
        "most of what actors and engines differ by is head",
        {"mismatch/mean": {10: 0.002, 20: 0.03}, "mismatch/head_mean": {10: 0.0, 20: 0.02}},
        "0.02 of 0.03 nats",
        "`model.head_dtype`",
    ),
    (
        "most of what actors and engines differ by is staleness",
        {"mismatch/mean": {20: 0.002}, "mismatch/kernels_mean": {20: 0.002}, "mismatch/staleness_mean": {20: 0.04}},
        "0.04 of 0.042 nats",
        "`algorithm.rollout_correction.mode` (none): truncate",
    ),
    ("engines are idle", {"perf/engine/idle": steady(0.4)}, "40% of a step", "`filter_groups.max_staleness` (0): 1"),
    (
        FALL,
        FALLEN,
        "0.800 (0.700 to 0.900) at step 20",
        "`checkpoint.resume` (auto): go back to a checkpoint near step 20",
    ),
    (
        "optimizer steps are skipped",
        {"actor/skipped_steps": {7: 2, 9: 1}},
        "3 optimizer steps",
        "`actor.optim.lr` (0.0003)",
    ),
]


@pytest.mark.parametrize(("rule", "metrics", "figure", "advice"), RULED)
def test_each_rule_fires_with_its_figures_and_a_key(rule, metrics, figure, advice):
    looks = found(SOUND | metrics, CONFIG)
    assert [*looks] == [rule]
    assert figure in looks[rule].what
    assert str(looks[rule].changes[0]).startswith(advice)
    assert all(change.value is not None for change in looks[rule].changes), "each names a key of the configuration"


PEAK = {step: 0.9 if 17 <= step <= 24 else 0.2 + step / 100 for step in range(1, STEPS + 1)}


@pytest.mark.parametrize(
    ("metrics", "severity"),
    [
        ({"actor/entropy": changing(0.5, 0.01)}, "note"),  # accuracy rises
        ({"actor/entropy": changing(0.5, 0.01), "rollout/accuracy": changing(0.6, 0.5)}, "warning"),
        ({"actor/entropy": changing(0.5, 0.01), "rollout/accuracy": PEAK}, "warning"),  # and falls again
        ({"buffer/all_correct": steady(80), "perf/generation_s": steady(60), "buffer/trained": steady(0)}, "note"),
        ({"buffer/all_correct": steady(80), "perf/generation_s": steady(95), "buffer/trained": steady(0)}, "warning"),
        ({"buffer/all_wrong": steady(60), "perf/generation_s": steady(10), "buffer/trained": steady(19)}, "warning"),
        ({"perf/engine/idle": steady(0.5)}, "note"),
        ({"perf/engine/idle": steady(0.7)}, "warning"),
        ({"reward/failed_crash": {1: 1.0}}, "warning"),
        ({"reward/failed_crash": steady(0.2)}, "error"),
        ({"parity/mean_abs_logprob_diff": steady(0.03)}, "warning"),
        ({"parity/mean_abs_logprob_diff": steady(0.06)}, "error"),
        ({"mismatch/mean": {20: 0.015}}, "note"),
        ({"mismatch/mean": {20: 0.03}}, "warning"),
        ({"actor/skipped_steps": steady(0.0) | {7: 2}}, "warning"),
        ({"actor/skipped_steps": steady(0.0) | {39: 2}}, "error"),
        (FALLEN, "error"),
    ],
)
def test_a_finding_is_as_severe_as_its_cost(metrics, severity):
    [look] = found(SOUND | metrics, CONFIG).values()
    assert look.severity == severity
    assert judged(SOUND | metrics) == ("well" if severity == "note" else severity)
    both = findings(Figures(metrics=SOUND | FALLEN | {"perf/engine/idle": steady(0.5)}, config=CONFIG))
    assert [one.severity for one in both] == ["error", "note"], "errors first"


def test_missing_verdicts_are_a_share_of_the_answers_where_steps_differ_in_size():
    """The first step drew 10 groups, and half of their answers have no verdict; the second drew 990."""
    few = {"buffer/drawn": {1: 10.0, 2: 990.0}, "reward/failed_wall": {1: 0.5}}
    assert found(few, CONFIG) == {}
    [look] = found(few | {"reward/failed_crash": {2: 0.02}}, CONFIG).values()
    assert look.what == "2.5% of all answers have no verdict: crash 2.0%, wall 0.5%"


def test_what_stale_tokens_add_is_no_drift():
    """The bound is on tokens of the current policy alone."""
    metrics = SOUND | {"parity/mean_abs_logprob_diff": steady(0.2)}
    assert found(metrics | {"parity/staleness_0/mean_abs_logprob_diff": steady(0.02)}, CONFIG) == {}
    assert len(found(metrics | {"parity/staleness_0/mean_abs_logprob_diff": steady(0.03)}, CONFIG)) == 1


def test_a_short_run_is_not_judged_by_its_trends():
    short = {name: {step: value[step] for step in value if step <= 9} for name, value in SOUND.items()}
    short = {name: value for name, value in short.items() if not name.startswith("reward/failed_")}
    short |= {"actor/entropy": dict.fromkeys(range(1, 6), 1.0) | dict.fromkeys(range(6, 10), 0.0)}
    assert found(short, CONFIG) == {} and found({}, CONFIG) == {}
    assert judged(short) == judged({}) == "early"
