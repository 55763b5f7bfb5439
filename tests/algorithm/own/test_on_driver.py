"""Own advantages, weights and filters: the built-in ones as files give the same, broken ones end the step."""

import math

import pytest

from dapo.algorithm.batch import build_batch
from dapo.algorithm.outcome import ALL_WRONG, MIXED, classifier, classify
from dapo.algorithm.own.loading import OwnFunctionError, forget, problems
from dapo.config.compose import compose
from dapo.sampling.buffer import OversamplingBuffer
from tests.support.fakes import make_group

ADVANTAGE, WEIGHTS, FILTER = "algorithm.advantage.function", "algorithm.token_weights", "filter_groups.function"
GROUPS = [make_group(index, [1.0, 0.0, 0.0, math.nan][: 4 - index % 2]) for index in range(4)]


@pytest.fixture(autouse=True)
def fresh():
    forget()
    yield
    forget()


def configured(folder, key, arguments, body):
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (folder / "my.py").write_text(f"import torch\n\n\ndef mine({arguments}):\n{lines}")
    sizes = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4"]
    return compose([f"{key}={folder}/my.py:mine", *sizes], "dapo_tiny")


BASE = "a = torch.where(rewards.isnan(), 0.0, rewards - rewards.nanmean(dim=1, keepdim=True)).nan_to_num()\n"


@pytest.mark.parametrize(
    ("key", "arguments", "body", "parts"),
    [
        pytest.param(ADVANTAGE, "rewards", "return rewards - rewards.mean()", ["not finite", "give 0"], id="nan"),
        pytest.param(ADVANTAGE, "rewards", BASE + "return a[:, 0]", ["of shape (4,)", "(4, 4)"], id="shape"),
        pytest.param(
            WEIGHTS,
            "response_lengths",
            "return 1 / (0.0 * response_lengths)",
            ["not finite"],
            id="infinite",
        ),
        pytest.param(WEIGHTS, "group_sizes", "return torch.ones(len(group_sizes))", ["of shape (4,)", "(14,)"], id="N"),
    ],
)
def test_what_they_must_not_give_ends_the_step_with_the_reason(tmp_path, key, arguments, body, parts):
    cfg = configured(tmp_path, key, arguments, body)
    assert [*problems(cfg)] == []
    with pytest.raises(OwnFunctionError) as error:
        build_batch(GROUPS, cfg, version=3)
    for part in (f"`{key}` ({tmp_path}/my.py:mine)", *parts):
        assert part in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("key", "value"), [(ADVANTAGE, "dapo/advantage.py:group_advantages"), (WEIGHTS, "dapo/loss.py:token_weights")]
)
@pytest.mark.parametrize("mode", ["token-mean", "group-token-mean", "seq-mean-token-sum-norm"])
def test_the_built_in_ones_as_files_pass_and_make_the_same_batch(key, value, mode):
    common = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=2", f"algorithm.loss_agg_mode={mode}"]
    plain, mine = compose(common, "dapo_tiny"), compose([*common, f"{key}={value}"], "dapo_tiny")
    assert [*problems(mine)] == []
    batches = [build_batch(GROUPS, cfg, version=3).minibatches for cfg in (plain, mine)]
    for one, other in zip(*batches, strict=True):
        assert [s.advantage for s in one] == [s.advantage for s in other]
        assert [s.token_weight for s in one] == [s.token_weight for s in other]


def test_the_built_in_filter_and_advantages_as_files_pass():
    cfg = compose([f"{FILTER}=dapo/algorithm/outcome.py:classify"], "dapo_tiny")
    assert [*problems(cfg)] == []
    groups = [*GROUPS, make_group(8, [1.0, 1.0]), make_group(9, [0.0, 0.0]), make_group(10, [math.nan, 1.0])]
    assert [classifier(cfg)(group, 2) for group in groups] == [classify(group, 2) for group in groups]
    assert classifier(compose([], "dapo_tiny")) is classify
    for name in ("rloo", "reinforce_plus_plus", "decoupled"):
        assert [*problems(compose([f"{ADVANTAGE}=dapo/advantage.py:{name}_advantages"], "dapo_tiny"))] == []


def test_the_buffer_trains_on_what_the_function_calls_mixed(tmp_path):
    """This one wants two right answers, which Eq. 11 does not ask for."""
    body = "right = sum(group.accuracies)\nreturn 'mixed' if 2 <= right < len(group.accuracies) else 'all_wrong'"
    cfg = configured(tmp_path, FILTER, "group", body)
    assert [*problems(cfg)] == []
    cfg.data.train_batch_size = 1
    buffer = OversamplingBuffer.of(cfg)
    buffer.open()
    started = buffer.take()
    accuracies = {0: [1.0, 0.0, 0.0, 0.0], 1: [1.0, 1.0, 0.0, 0.0]}
    for index in started[:2]:
        buffer.generated(index, 10)
        buffer.add(make_group(index, accuracies[index]))
    collected = buffer.close()
    assert [group.draw.index for group in collected.groups] == [1]
    assert collected.fates == (ALL_WRONG, "trained") and collected.outcomes == (ALL_WRONG, MIXED)


def test_what_an_own_filter_must_not_give_ends_the_run(tmp_path):
    body = "return 'mixed' if len(group.responses) == 4 else 'good'"
    cfg = configured(tmp_path, FILTER, "group", body)
    assert [*problems(cfg)] == []
    with pytest.raises(OwnFunctionError, match=r"gives 'good'; give one of mixed"):
        classifier(cfg)(make_group(0, [1.0, 0.0]), 2)
