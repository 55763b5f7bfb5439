"""The order of the draws: a function of the index alone, each prompt once per epoch, each source by its share."""

from collections import Counter

import numpy as np
import pytest

from dapo.config.schema import Config
from dapo.data.order import PromptHistory, PromptOrder, Retire, Shares
from dapo.types import Prompt
from tests.support.fakes import make_group, make_prompt


def prompts_of(count: int) -> list[Prompt]:
    ids = np.zeros(1, dtype=np.int32)
    return [
        Prompt(
            id=i, source="s", messages=(("user", str(i)),), text=str(i), token_ids=ids, ground_truth="1", extra_info={}
        )
        for i in range(count)
    ]


def test_order_visits_every_prompt_once_per_epoch_and_needs_only_the_index():
    prompts = prompts_of(50)
    order = PromptOrder(prompts, seed=3, shuffle=True)
    visits = [order.draw(index).prompt.id for index in range(150)]
    epochs = [visits[:50], visits[50:100], visits[100:]]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(50))
    again = PromptOrder(prompts, seed=3, shuffle=True)
    for index in (149, 0, 75, 74, 149):
        draw = again.draw(index)
        assert (draw.index, draw.prompt.id) == (index, visits[index])
    other = PromptOrder(prompts, seed=4, shuffle=True)
    assert [other.draw(index).prompt.id for index in range(50)] != epochs[0]


def test_order_without_shuffle_is_the_order_of_the_file():
    order = PromptOrder(prompts_of(3), seed=0, shuffle=False)
    assert [order.draw(index).prompt.id for index in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_what_is_no_order_or_history_is_named(tmp_path):
    rule = Retire(after=1, steps=5, most=0.5)
    order = PromptOrder(prompts_of(5), seed=0, shuffle=True, curriculum=rule)
    order.saved().write(tmp_path)
    PromptOrder(prompts_of(5), seed=0, shuffle=True, curriculum=rule).restore(tmp_path, version=3)
    for text in ("{", '{"first": -1, "cursors": [0], "visits": {}}', '{"first": 0, "cursors": [0, 0], "visits": {}}'):
        (tmp_path / "order.json").write_text(text)
        with pytest.raises(ValueError, match=r"order.json is no order of draws .*remove this checkpoint's directory"):
            order.restore(tmp_path, version=3)
    (tmp_path / "history.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"history.parquet is no history of 5 prompts .*remove this checkpoint's dir"):
        order.restore(tmp_path, version=3)


@pytest.mark.parametrize("most", [0.0, 0.5, 0.99])
def test_not_all_prompts_retire_at_once(most):
    history = PromptHistory.empty(20)
    history.visits[:], history.solved[:], history.last_version[:] = 3, 3, np.arange(20)
    chances = Retire(after=3, steps=100, most=most).chances(history, np.arange(20), version=21)
    away = np.flatnonzero(chances == 0)
    assert len(away) == int(most * 20) and list(away) == list(range(20 - len(away), 20)), "the newest are away"
    later = Retire(after=3, steps=100, most=most).chances(history, np.arange(20), version=119)
    assert set(np.flatnonzero(later == 0)) == set(away[away >= 19])


WEIGHTS = [[1.0], [0.5, 0.5], [3.0, 1.0], [0.7, 0.2, 0.1], [1.0, 1e-3], [5.0, 4.0, 3.0, 2.0, 1.0], [0.1] * 9]


def test_a_visit_is_solved_where_the_filter_of_the_run_says_so():
    cfg = Config()
    cfg.filter_groups.min_scored = 3
    prompts = [make_prompt(number) for number in range(3)]
    order = PromptOrder.of(cfg, prompts)
    order.learn([make_group(0, [1.0, 1.0]), make_group(1, [1.0] * 3)], live=(), settled=0, version=1)
    assert order._history.solved.tolist() == [0, 1, 0], "two verdicts are too few"


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_stretch_of_draws_holds_the_shares(weights):
    shares = Shares(weights)
    assert sum(shares.parts) == pytest.approx(1) and shares.parts[0] == pytest.approx(weights[0] / sum(weights))
    places = [shares.place(index) for index in range(3000)]
    seen: Counter[int] = Counter()
    for index, (source, rank) in enumerate(places):
        assert shares.counts(index) == [seen[one] for one in range(len(weights))]
        assert rank == seen[source]
        seen[source] += 1
    for first in range(0, 3000, 37):
        for length in (1, 16, 100, 977):
            found = Counter(source for source, _ in places[first : first + length])
            for source, part in enumerate(shares.parts):
                assert abs(found[source] - part * len(places[first : first + length])) <= 2 + len(weights) / 2


def test_a_draw_far_out_needs_no_memory():
    shares = Shares([0.3, 0.3, 0.4])
    for index in (10**9, 10**15 + 7):
        before, after = shares.counts(index), shares.counts(index + 1)
        source, rank = shares.place(index)
        assert after[source] == before[source] + 1 == rank + 1 and sum(after) == index + 1
