"""Runs with a curriculum and with several sources: the same whatever the timing, also interrupted and killed."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from dapo.config.schema import Config
from dapo.config.sources import SourceConfig
from dapo.data.order import PromptOrder
from dapo.replay.batches import BATCHES, SavedStream
from dapo.types import Group
from tests.support.driver.loops import PROMPTS, make_trainer, tiny_config
from tests.support.driver.saved_runs import tokens
from tests.support.fakes import FakeRollouts
from tests.support.faulty_pools import turns

STEPS = 14
CHANGES = {
    "uniform": {},
    "retire": {"curriculum": "retire", "retire_after": 1, "retire_steps": 4},
    "weighted": {"curriculum": "weighted", "min_weight": 0.05},
}
MIXTURE = {"two": 3.0, "three": 1.0, "one": 0.5}
MIXED = [replace(prompt, entry=[*MIXTURE][prompt.id % 3]) for prompt in PROMPTS]


def pass_rate(prompt) -> float:
    return prompt.id % 5 / 4  # a fifth never, a fifth always


def by_rate(prompt, sample, response) -> float:
    return float(int(response.text) % 1000 < 1000 * pass_rate(prompt))


def config(curriculum: str, sources: bool = False, **trainer) -> Config:
    cfg = tiny_config(**trainer)
    cfg.eval.every, cfg.eval.before_train, cfg.eval.after_train = 0, False, False
    for key, value in CHANGES[curriculum].items():
        setattr(cfg.data, key, value)
    if sources:
        cfg.data.sources = [SourceConfig(name=name, weight=weight) for name, weight in MIXTURE.items()]
    return cfg


class Run:
    """A trainer that notes what each update used up."""

    def __init__(self, folder, cfg: Config, *, timing: int = 0) -> None:
        rollouts = FakeRollouts(seed=timing, max_turns=5 + timing)
        prompts = MIXED if cfg.data.sources else PROMPTS
        self.trainer, self.actors = make_trainer(folder, cfg, verdict=by_rate, rollouts=rollouts, prompts=prompts)
        self.used: dict[int, list[Group]] = {}  # by the version that the update started from
        collect = self.trainer.stream.collect

        async def noted():
            collected = await collect()
            self.used[self.trainer.version] = list(collected.drawn)
            return collected

        self.trainer.stream.collect = noted

    def whole(self) -> "Run":
        asyncio.run(self.trainer.run())
        self.trainer.saver.close()
        return self

    @property
    def drawn(self) -> dict[int, list[tuple[int, int]]]:
        return {v: [(group.draw.index, group.draw.prompt.id) for group in used] for v, used in self.used.items()}


@pytest.fixture(scope="module", params=[(name, mixed) for name in CHANGES for mixed in (False, True)], ids=str)
def straight(request, tmp_path_factory):
    name, mixed = request.param
    return name, mixed, Run(tmp_path_factory.mktemp("straight") / "run", config(name, mixed, total_steps=STEPS)).whole()


@pytest.mark.parametrize("timing", [7, 30])
def test_what_is_drawn_does_not_depend_on_timing(tmp_path, straight, timing):
    name, mixed, wanted = straight
    found = Run(tmp_path / "run", config(name, mixed, total_steps=STEPS), timing=timing).whole()
    assert found.drawn == wanted.drawn and tokens(found.actors) == tokens(wanted.actors)


@pytest.mark.parametrize("parts", [(1,), (3, 4), (7, 10, 13)])
def test_a_run_in_parts_is_the_whole_run(tmp_path, straight, parts):
    name, mixed, wanted = straight
    found: dict = {}
    for timing, end in enumerate((*parts, STEPS)):
        found |= Run(tmp_path / "run", config(name, mixed, total_steps=end), timing=timing).whole().drawn
    assert found == wanted.drawn


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("crash", [(0, 9), (5, 25), (12, 14)])
def test_a_killed_run_goes_on_as_the_whole_run(tmp_path, straight, journal, crash):
    """It dies some turns of the event loop after a step, and nothing is saved: the journal is all there is."""
    name, mixed, wanted = straight
    cfg = config(name, mixed, total_steps=STEPS)
    cfg.checkpoint.journal = journal
    first = Run(tmp_path / "run", cfg, timing=3)

    async def until_it_dies() -> None:
        await first.trainer._resume()
        while first.trainer.version < crash[0]:
            await first.trainer.step()
        running = asyncio.create_task(first.trainer.step())
        await turns(crash[1])
        running.cancel()
        first.trainer.saver.journal.close()

    asyncio.run(until_it_dies())
    second = Run(tmp_path / "run", cfg, timing=5).whole()
    assert second.drawn == {version: wanted.drawn[version] for version in second.drawn}
    assert max(second.drawn) == STEPS - 1
    assert tokens(second.actors) == tokens(wanted.actors)[STEPS - len(second.drawn) :]


def test_a_stopped_step_keeps_its_groups_and_its_prompts(tmp_path, straight):
    name, mixed, wanted = straight
    first = Run(tmp_path / "run", config(name, mixed, total_steps=STEPS), timing=2)

    async def stopped() -> None:
        await first.trainer._resume()
        while first.trainer.version < 5:
            await first.trainer.step()
        running = asyncio.create_task(first.trainer.step())
        await turns(30)
        running.cancel()
        await asyncio.wait([running])
        await first.trainer.stream.close()
        await first.trainer.save()
        first.trainer.saver.close()

    asyncio.run(stopped())
    held = {group.draw.index: group.draw.prompt.id for group, _ in first.trainer._buffer.held()}
    assert first.trainer.version > 5 or held, "the test shows nothing"
    second = Run(tmp_path / "run", config(name, mixed, total_steps=STEPS)).whole()
    assert second.drawn == {version: wanted.drawn[version] for version in second.drawn}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("staleness", [1, 2])
def test_above_staleness_0_no_draw_changes_its_prompt_once_it_has_groups(tmp_path, name, staleness):
    cfg = config(name, True, total_steps=STEPS)
    cfg.filter_groups.max_staleness = staleness
    drawn: dict = {}
    for end in (3, 5, 8, STEPS):
        cfg.trainer.total_steps = end
        run = Run(tmp_path / "run", cfg, timing=end)
        asyncio.run(run.trainer._resume())
        held = {group.draw.index: group.draw.prompt.id for group, _ in run.trainer._buffer.held()}
        run = Run(tmp_path / "run", cfg, timing=end).whole()
        for used in run.drawn.values():
            assert all(held.get(index, prompt) == prompt for index, prompt in used)
        drawn |= run.drawn
    indices = [index for version in sorted(drawn) for index, _ in drawn[version]]
    assert indices == list(range(len(indices))) and len(drawn) == STEPS


def visits(run: Run) -> Counter[int]:
    return Counter(prompt for used in run.drawn.values() for _, prompt in used)


def test_what_is_solved_or_never_solved_is_drawn_less_often(tmp_path):
    found = {}
    for name in CHANGES:
        cfg = config(name, total_steps=40)
        cfg.checkpoint.every, cfg.data.retire_steps = 0, 20
        run = Run(tmp_path / name, cfg).whole()
        count = visits(run)
        found[name] = [sum(count[p.id] for p in PROMPTS if p.id % 5 == kind) / sum(count.values()) for kind in range(5)]
    assert max(abs(share - 0.2) for share in found["uniform"]) < 0.02
    assert found["retire"][4] < 0.1 and min(found["retire"][:3]) > 0.2
    assert found["weighted"][0] + found["weighted"][4] < 0.36, "two fifths of the prompts"
    # Of four responses (0 + 1) / (4 + 2) right: a chance of 0.56 where none or all are, and of more in the middle.
    shares = run.trainer._order.shares()
    assert shares.sum() == pytest.approx(1)
    ends = [shares[prompt.id] for prompt in PROMPTS if prompt.id % 5 in (0, 4)]
    assert ends == pytest.approx([ends[0]] * len(ends)) and ends[0] < 0.8 * shares[2::5].mean()


def test_retired_prompts_come_back_after_the_steps(tmp_path):
    run = Run(tmp_path / "run", config("retire", total_steps=40)).whole()
    last: dict[int, int] = {}
    gaps = []
    for version in sorted(run.drawn):
        for _, prompt in run.drawn[version]:
            if prompt % 5 == 4:
                gaps.append(version - last.get(prompt, -100))
                last[prompt] = version
    gaps = [gap for gap in gaps if gap < 100]
    assert gaps and min(gap for gap in gaps if gap) > 4  # not during the 4 steps after it was solved
    assert len(last) == sum(prompt.id % 5 == 4 for prompt in PROMPTS)


def test_the_history_of_a_checkpoint_is_what_the_updates_used_up(tmp_path):
    run = Run(tmp_path / "run", config("uniform", total_steps=STEPS)).whole()
    history = run.trainer._order.saved().history
    again = Run(tmp_path / "run", config("uniform", total_steps=STEPS))
    asyncio.run(again.trainer._resume())
    found = again.trainer._order.saved().history
    by_prompt: dict[int, list[tuple[int, Group]]] = {}
    for version in sorted(run.used):
        for group in run.used[version]:
            by_prompt.setdefault(group.draw.prompt.id, []).append((version, group))
    for prompt in PROMPTS:
        seen = by_prompt.get(prompt.id, [])
        assert history.visits[prompt.id] == found.visits[prompt.id] == len(seen)
        assert history.last_version[prompt.id] == (seen[-1][0] if seen else -1)
        assert history.pass_rate[prompt.id] == found.pass_rate[prompt.id]
        assert history.variance[prompt.id] == found.variance[prompt.id]
        assert history.solved[prompt.id] == found.solved[prompt.id]
        if len(seen) == 1:
            accuracies = seen[0][1].accuracies
            assert history.pass_rate[prompt.id] == pytest.approx(sum(accuracies) / len(accuracies))
        if prompt.id % 5 == 4:
            assert history.pass_rate[prompt.id] == (1.0 if seen else 0.0) and history.solved[prompt.id] == len(seen)


def test_batches_that_were_kept_find_their_prompts_again(tmp_path):
    cfg = config("retire", True, total_steps=STEPS)
    run = Run(tmp_path / "run", cfg).whole()
    order = PromptOrder.of(cfg, MIXED)
    stream = SavedStream(tmp_path / "run" / BATCHES, run.trainer._buffer, order.draw, order.know)
    for version in range(STEPS):
        run.trainer._buffer.version = version
        found = asyncio.run(stream.collect()).groups
        wanted = [group for group in run.used[version] if len(set(group.accuracies)) > 1]
        assert [(g.draw.index, g.draw.prompt.id) for g in found] == [(g.draw.index, g.draw.prompt.id) for g in wanted]
    assert any(PromptOrder.of(cfg, MIXED).draw(g.draw.index).prompt.id != g.draw.prompt.id for g in wanted)
