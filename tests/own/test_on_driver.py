"""Own advantages, weights and filters: the built-in ones pass and give the same, broken ones are refused."""

import math

import pytest

from dapo.batch import build_batch
from dapo.config.compose import compose
from dapo.own.check import own_functions
from dapo.own.loading import OwnFunctionError, forget
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.outcome import ALL_WRONG, MIXED, classifier, classify
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
GROUP_ORDER = "return a * torch.arange(1, len(a) + 1)[:, None]"
CUMULATED = "return a.cumsum(1) * ~rewards.isnan()"
IN_PLACE = "rewards.nan_to_num_()\nreturn a"
RANDOM = "return a * torch.rand(1).double()"
ROW_NUMBERS = "return torch.arange(len(response_lengths)).float()"
CHANGED = "group.draw.prompt.extra_info['seen'] = 1\nreturn 'mixed'"
FIRST_RESPONSE = "return 'mixed' if group.scores[0].accuracy > 0 else 'all_wrong'"


@pytest.mark.parametrize(
    ("key", "arguments", "body", "parts"),
    [
        pytest.param(ADVANTAGE, "rewards", "return rewards - rewards.mean()", ["not finite", "give 0"], id="nan"),
        pytest.param(ADVANTAGE, "rewards", "return rewards.nan_to_num(1.0)", ["unscorable", "give 0"], id="unscorable"),
        pytest.param(ADVANTAGE, "rewards", BASE + "return a[:, 0]", ["of shape (5,)", "(5, 4)"], id="shape"),
        pytest.param(ADVANTAGE, "rewards", "return 0 * rewards.nan_to_num()", ["advantage 0 to every"], id="zero"),
        pytest.param(ADVANTAGE, "rewards", BASE + GROUP_ORDER, ["depends on the order of the groups"], id="groups"),
        pytest.param(ADVANTAGE, "rewards", BASE + CUMULATED, ["order of the responses"], id="order"),
        pytest.param(ADVANTAGE, "rewards", BASE + "return a / rewards.shape[1]", ["NaN that pads"], id="padding"),
        pytest.param(ADVANTAGE, "rewards", BASE + IN_PLACE, ["changes `rewards` in place"], id="in place"),
        pytest.param(ADVANTAGE, "rewards", BASE + RANDOM, ["other advantages for the same"], id="random"),
        pytest.param(WEIGHTS, "response_lengths", "return 1.0 / response_lengths", ["not finite"], id="infinite"),
        pytest.param(WEIGHTS, "response_lengths", "return response_lengths * 0.0", ["weight 0 to every"], id="zeros"),
        pytest.param(WEIGHTS, "response_lengths", "return response_lengths.float() - 3", ["below 0"], id="negative"),
        pytest.param(WEIGHTS, "response_lengths", ROW_NUMBERS, ["order of"], id="rows"),
        pytest.param(WEIGHTS, "group_sizes", "return torch.ones(len(group_sizes))", ["of shape (3,)", "(8,)"], id="N"),
        pytest.param(FILTER, "group", "return True", ["gives True", "mixed, all_correct, all_wrong"], id="bool"),
        pytest.param(FILTER, "group", "return 'all_wrong'", ["calls none of 6 groups `mixed`"], id="nothing kept"),
        pytest.param(FILTER, "group", FIRST_RESPONSE, ["order of the responses"], id="first response"),
        pytest.param(FILTER, "group", CHANGED, ["changes the group in place"], id="group in place"),
    ],
)
def test_broken_ones_are_refused_with_the_reason(tmp_path, key, arguments, body, parts):
    problems = own_functions(configured(tmp_path, key, arguments, body))
    assert len(problems) == 1
    for part in (f"`{key}` ({tmp_path}/my.py:mine)", *parts):
        assert part in problems[0], problems[0]


@pytest.mark.parametrize(
    ("key", "value"), [(ADVANTAGE, "dapo/advantage.py:group_advantages"), (WEIGHTS, "dapo/loss.py:token_weights")]
)
@pytest.mark.parametrize("mode", ["token-mean", "group-token-mean", "seq-mean-token-sum-norm"])
def test_the_built_in_ones_as_files_pass_and_make_the_same_batch(key, value, mode):
    common = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=2", f"algorithm.loss_agg_mode={mode}"]
    plain, mine = compose(common, "dapo_tiny"), compose([*common, f"{key}={value}"], "dapo_tiny")
    assert own_functions(mine) == []
    batches = [build_batch(GROUPS, cfg, version=3).minibatches for cfg in (plain, mine)]
    for one, other in zip(*batches, strict=True):
        assert [s.advantage for s in one] == [s.advantage for s in other]
        assert [s.token_weight for s in one] == [s.token_weight for s in other]


def test_the_built_in_filter_and_advantages_as_files_pass():
    cfg = compose([f"{FILTER}=dapo/sampling/outcome.py:classify"], "dapo_tiny")
    assert own_functions(cfg) == []
    groups = [*GROUPS, make_group(8, [1.0, 1.0]), make_group(9, [0.0, 0.0]), make_group(10, [math.nan, 1.0])]
    assert [classifier(cfg)(group, 2) for group in groups] == [classify(group, 2) for group in groups]
    assert classifier(compose([], "dapo_tiny")) is classify
    for name in ("rloo", "reinforce_plus_plus", "decoupled"):
        assert own_functions(compose([f"{ADVANTAGE}=dapo/advantage.py:{name}_advantages"], "dapo_tiny")) == []


def test_the_buffer_trains_on_what_the_function_calls_mixed(tmp_path):
    """This one wants two right answers, which Eq. 11 does not ask for."""
    body = "right = sum(group.accuracies)\nreturn 'mixed' if 2 <= right < len(group.accuracies) else 'all_wrong'"
    cfg = configured(tmp_path, FILTER, "group", body)
    assert own_functions(cfg) == []
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
    assert own_functions(cfg) == []
    with pytest.raises(OwnFunctionError, match=r"gives 'good'; give one of mixed"):
        classifier(cfg)(make_group(0, [1.0, 0.0]), 2)
