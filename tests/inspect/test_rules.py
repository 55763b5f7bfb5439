"""What there is to look at in a run: each rule fires on the figures that it is about, and on no others."""

from dataclasses import asdict

import pytest

from dapo.config.compose import compose
from dapo.inspect.figures import Figures
from dapo.inspect.findings import Agreement
from dapo.inspect.rules import RULES, findings

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
AGREES = Agreement("math", pairs=500, wrong=60, even=40)


def found(metrics: dict[str, dict[int, float]], rewards: list[Agreement], config: dict) -> dict[str, object]:
    return {look.rule: look for look in findings(Figures(metrics=metrics, rewards=rewards, config=config))}


def given(section: str, key: str, value: object) -> dict:
    return CONFIG | {section: CONFIG[section] | {key: value}}


def test_a_sound_run_has_nothing_to_look_at():
    assert found(SOUND, [AGREES], CONFIG) == {}


@pytest.mark.parametrize(
    ("metrics", "rule", "figures", "first_change"),
    [
        (
            {"actor/entropy": changing(0.5, 0.2)},
            "entropy falls",
            ["0.5 nats (steps 1 to 8)", "0.2 (steps 33 to 40)", "60% less", "0.200 to 0.600"],
            "`algorithm.clip_ratio_high` (0.28): raise it",
        ),
        (
            {"rollout/truncated": changing(0.02, 0.1)},
            "truncation rises",
            ["10.0% of the answers", "2.0% at first"],
            "`data.max_response_length` (128): raise it",
        ),
        (
            {"buffer/all_correct": steady(50.0), "buffer/trained": steady(30.0)},
            "many groups teach nothing",
            ["70% of 100 groups", "50% all correct, 19% all wrong, 1% unscorable"],
            "`data.train_files`",
        ),
        (
            {"buffer/all_wrong": steady(45.0), "buffer/trained": steady(34.0)},
            "many groups teach nothing",
            ["45% all wrong"],
            "`rollout.n` (16): more answers",
        ),
        (
            {"buffer/trained": steady(10.0)},
            "many groups teach nothing",
            ["90% of 100 groups", "50% overlong"],
            "`data.max_response_length`",
        ),
        (
            {"reward/failed_timeout": steady(0.02), "reward/failed_crash": {1: 1.0}},
            "verdicts are missing",
            ["4.5% of all answers", "crash 2.5%, timeout 2.0%"],
            "`reward.limits.wall_s` (10.0)",
        ),
        (
            {"parity/mean_abs_logprob_diff": steady(0.03)},
            "actors and engines drift apart",
            ["0.03 nats (steps 33 to 40)", "above 0.05 batches"],
            "`algorithm.rollout_correction.mode` (none): truncate",
        ),
        (
            {"parity/mean_abs_logprob_diff": changing(0.001, 0.006)},
            "actors and engines drift apart",
            ["is 0.006 nats", "0.001 at first"],
            "`algorithm",
        ),
        (
            {"perf/engine/idle": steady(0.4), "perf/update_s": steady(35.0)},
            "engines are idle",
            ["40% of a step of 100 s", "update 35 s"],
            "`filter_groups.max_staleness` (0): 1 or more",
        ),
        (
            {"eval/accuracy": {0: 0.3, 20: 0.8, 40: 0.5}, "eval/accuracy_low": {0: 0.2, 20: 0.7, 40: 0.4}}
            | {"eval/accuracy_high": {0: 0.4, 20: 0.9, 40: 0.6}},
            "held-out accuracy falls",
            ["0.500 (0.400 to 0.600) at step 40", "0.800 (0.700 to 0.900) at step 20"],
            "`checkpoint.resume` (auto): go back to a checkpoint near step 20",
        ),
        (
            {"actor/skipped_steps": steady(0.0) | {7: 2.0, 9: 1.0}},
            "optimizer steps are skipped",
            ["3 optimizer steps", "at step 9"],
            "`actor.optim.lr` (0.0003): lower it",
        ),
    ],
)
def test_each_rule_fires_with_its_figures_and_a_key(metrics, rule, figures, first_change):
    looks = found(SOUND | metrics, [AGREES], CONFIG)
    assert [*looks] == [rule]
    assert all(text in looks[rule].what for text in figures), looks[rule].what
    assert str(looks[rule].changes[0]).startswith(first_change)
    assert all(change.value is not None for change in looks[rule].changes), "each names a key of the configuration"


def test_a_reward_function_that_disagrees_is_named_with_a_group_that_shows_it():
    against = Agreement("format", pairs=500, wrong=150, even=100, by_draw={7: 3.0, 8: 9.0})
    few = Agreement("rare", pairs=99, wrong=99, even=0)
    [look] = found(SOUND, [few, against, AGREES], CONFIG).values()
    assert "`format` gives the worse answer more in 30% of 500 pairs" in look.what and "as much in 20%" in look.what
    assert look.draws == (8,) and look.changes[0].key == "reward.functions"
    assert found(SOUND, [few], CONFIG) == {}


def test_answers_that_are_wrong_for_a_limit_are_no_missing_verdicts():
    [look] = found(SOUND | {"reward/failed_wall": steady(0.0203)}, [], CONFIG).values()
    assert "2.3% of all answers have no verdict: wall 2.0%, timeout 0.2%" in look.what


def test_missing_verdicts_are_a_share_of_the_answers_where_steps_differ_in_size():
    """The first step drew 10 groups, and half of their answers have no verdict; the second drew 990."""
    few = {"buffer/drawn": {1: 10.0, 2: 990.0}, "reward/failed_wall": {1: 0.5}}
    assert found(few, [], CONFIG) == {}
    [look] = found(few | {"reward/failed_crash": {2: 0.02}}, [], CONFIG).values()
    assert look.what == "2.5% of all answers have no verdict: crash 2.0%, wall 0.5%"


def test_what_stale_tokens_add_is_no_drift():
    """The bound is on tokens of the current policy alone."""
    metrics = SOUND | {"parity/mean_abs_logprob_diff": steady(0.2)}
    assert found(metrics | {"parity/staleness_0/mean_abs_logprob_diff": steady(0.02)}, [], CONFIG) == {}
    assert len(found(metrics | {"parity/staleness_0/mean_abs_logprob_diff": steady(0.03)}, [], CONFIG)) == 1


def test_what_is_advised_depends_on_the_configuration():
    idle = SOUND | {"perf/engine/idle": steady(0.4)}
    assert (
        found(idle, [], given("trainer", "colocate", "time"))["engines are idle"].changes[0].key == "trainer.colocate"
    )
    cut = SOUND | {"rollout/truncated": changing(0.0, 0.5)}
    keys = [change.key for change in found(cut, [], CONFIG)["truncation rises"].changes]
    assert "reward.overlong_buffer.enable" not in keys, "it is on"
    assert "reward.overlong_filtering.enable" in keys
    easy = SOUND | {"buffer/all_correct": steady(70.0), "buffer/trained": steady(100.0)}
    look = found(easy, [], given("filter_groups", "enable", False))["many groups teach nothing"]
    assert "are of one accuracy" in look.what and look.changes[-1].key == "filter_groups.enable"
    assert all(change.value is None for look in found(easy, [], {}).values() for change in look.changes)


def test_a_short_run_is_not_judged_by_its_trends():
    short = {name: {step: value[step] for step in value if step <= 9} for name, value in SOUND.items()}
    short = {name: value for name, value in short.items() if not name.startswith("reward/failed_")}
    short |= {"actor/entropy": dict.fromkeys(range(1, 6), 1.0) | dict.fromkeys(range(6, 10), 0.0)}
    assert found(short, [], CONFIG) == {} and found({}, [], CONFIG) == {}
    assert len(RULES) == 9
