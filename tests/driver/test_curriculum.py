"""Runs with a curriculum and with several sources: the same whatever the timing, also in parts, stopped and killed."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from dapo.config.sampling import SourceConfig
from dapo.config.schema import Config
from dapo.data.order import PromptOrder
from dapo.state.batches import BATCHES, SavedStream
from dapo.types import Group
from tests.support.driver.loops import PROMPTS, cancelled, killed, make_trainer, seen, tiny_config, tokens, whole
from tests.support.fakes import FakeRollouts

STEPS = 10
CHANGES = {
    "uniform": {},
    "retire": {"curriculum": "retire", "retire_after": 1, "retire_steps": 4},
    "weighted": {"curriculum": "weighted", "min_weight": 0.05},
}
MIXTURE = {"two": 3.0, "three": 1.0, "one": 0.5}
MIXED = [replace(prompt, entry=[*MIXTURE][prompt.id % 3]) for prompt in PROMPTS]


def by_rate(prompt, sample, response) -> float:
    """A fifth of the prompts is never solved, a fifth always."""
    return float(int(response.text) % 1000 < 250 * (prompt.id % 5))


def config(curriculum: str, sources: bool = False, **trainer) -> Config:
    cfg = tiny_config(**trainer)
    cfg.eval.every, cfg.eval.before_train, cfg.eval.after_train = 0, False, False
    for key, value in CHANGES[curriculum].items():
        setattr(cfg.data, key, value)
    if sources:
        cfg.data.sources = [SourceConfig(name=name, weight=weight) for name, weight in MIXTURE.items()]
    return cfg


class Run:
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
        whole(self.trainer)
        return self

    @property
    def drawn(self) -> dict[int, list[tuple[int, int]]]:
        return {v: [(group.draw.index, group.draw.prompt.id) for group in used] for v, used in self.used.items()}


@pytest.fixture(scope="module", params=[("uniform", False), ("retire", True), ("weighted", True)], ids=str)
def straight(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    return request.param, Run(folder, config(*request.param, total_steps=STEPS)).whole()


@pytest.mark.parametrize("parts", [(), (3, 4), (5, 7, 9)])
def test_a_run_in_parts_and_with_another_timing_is_the_whole_run(tmp_path, straight, parts):
    kind, wanted = straight
    drawn, trained = {}, []
    for timing, end in enumerate((*parts, STEPS), 7):
        part = Run(tmp_path / "run", config(*kind, total_steps=end), timing=timing).whole()
        drawn |= part.drawn
        trained += tokens(part.actors)
    assert drawn == wanted.drawn and trained == tokens(wanted.actors)


async def stopped(trainer, version: int, count: int) -> set[int]:
    """As `killed`, and saved by a signal."""
    await asyncio.wait([await cancelled(trainer, version, count)])
    await trainer.stream.close()
    await trainer.save()
    trainer.saver.close()
    return {group.draw.index for group, _ in trainer.buffer.held()}


@pytest.mark.parametrize("how", ["killed", "killed without a journal", "stopped"])
@pytest.mark.parametrize("crash", [(0, 9), (6, 25), (8, 14)])
def test_a_run_that_ends_goes_on_as_the_whole_run_and_generates_less(tmp_path, straight, how, crash):
    kind, wanted = straight
    cfg = config(*kind, total_steps=STEPS)
    cfg.checkpoint.journal = how != "killed without a journal"
    first = Run(tmp_path / "run", cfg, timing=3)
    held = asyncio.run((stopped if how == "stopped" else killed)(first.trainer, *crash))
    second = Run(tmp_path / "run", cfg, timing=5).whole()
    assert second.drawn == {version: wanted.drawn[version] for version in second.drawn}
    assert max(second.drawn) == STEPS - 1
    assert tokens(second.actors) == tokens(wanted.actors)[STEPS - len(second.drawn) :]
    again = {f"v{first.trainer.version}-d{index}" for index in held} & set(seen(second.trainer))
    if how == "stopped" or (how == "killed" and first.trainer.version % 2 == 0):
        assert not again
    elif first.trainer.version == crash[0] and crash[1] >= 20:
        assert again, "the test shows nothing"


@pytest.mark.parametrize(("name", "staleness"), [("uniform", 1), ("retire", 1), ("retire", 2), ("weighted", 2)])
def test_above_staleness_0_no_draw_changes_its_prompt_once_it_has_groups(tmp_path, name, staleness):
    cfg = config(name, True, total_steps=STEPS)
    cfg.filter_groups.max_staleness = staleness
    drawn: dict = {}
    for end in (3, 5, 8, STEPS):
        cfg.trainer.total_steps = end
        resumed = Run(tmp_path / "run", cfg, timing=end)
        asyncio.run(resumed.trainer.resume())
        held = {group.draw.index: group.draw.prompt.id for group, _ in resumed.trainer.buffer.held()}
        run = Run(tmp_path / "run", cfg, timing=end).whole()
        for used in run.drawn.values():
            assert all(held.get(index, prompt) == prompt for index, prompt in used)
        drawn |= run.drawn
    indices = [index for version in sorted(drawn) for index, _ in drawn[version]]
    assert indices == list(range(len(indices))) and len(drawn) == STEPS


def test_what_is_solved_or_never_solved_is_drawn_less_often(tmp_path):
    found = {}
    for name in CHANGES:
        cfg = config(name, total_steps=40)
        cfg.checkpoint.every, cfg.data.retire_steps = 0, 20
        run = Run(tmp_path / name, cfg).whole()
        count = Counter(prompt % 5 for used in run.drawn.values() for _, prompt in used)
        found[name] = [count[kind] / count.total() for kind in range(5)]
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
    steps: dict[int, list[int]] = {}
    for version, used in run.drawn.items():
        for _, prompt in used:
            steps.setdefault(prompt, []).append(version)
    gaps = [b - a for prompt in range(4, 40, 5) for a, b in zip(steps[prompt], steps[prompt][1:], strict=False)]
    assert gaps and min(gap for gap in gaps if gap) > 4  # not during the 4 steps after it was solved


def test_the_history_of_a_checkpoint_is_what_the_updates_used_up(tmp_path):
    run = Run(tmp_path / "run", config("uniform", total_steps=STEPS)).whole()
    history = run.trainer._order.saved().history
    again = Run(tmp_path / "run", config("uniform", total_steps=STEPS))
    asyncio.run(again.trainer.resume())
    found = again.trainer._order.saved().history
    used = [(version, group) for version in sorted(run.used) for group in run.used[version]]
    for prompt in range(len(PROMPTS)):
        own = [(version, group) for version, group in used if group.draw.prompt.id == prompt]
        assert history.visits[prompt] == found.visits[prompt] == len(own)
        assert history.last_version[prompt] == (own[-1][0] if own else -1)
        for name in ("pass_rate", "variance", "solved"):
            assert getattr(history, name)[prompt] == getattr(found, name)[prompt]
        if len(own) == 1:
            assert history.pass_rate[prompt] == pytest.approx(sum(own[0][1].accuracies) / len(own[0][1].accuracies))
        if prompt % 5 == 4:
            assert history.pass_rate[prompt] == (1.0 if own else 0.0) and history.solved[prompt] == len(own)


@pytest.mark.parametrize("name", ["uniform", "weighted"])
def test_what_is_known_of_the_prompts_outlives_an_accepted_change_that_leaves_them_as_they_are(tmp_path, name, capsys):
    cfg = config(name, total_steps=STEPS)
    Run(tmp_path / "run", cfg).whole()
    visits = {}
    for keeps in ("groups", "history", "nothing"):
        again = Run(tmp_path / "run", cfg).trainer
        again.saver._store.keeps_groups = keeps == "groups"
        again.saver._store.keeps_history = keeps != "nothing"
        asyncio.run(again.resume())
        again.saver.close()
        visits[keeps] = again._order.saved().history.visits.sum(), again._order.shares().tolist()
    assert visits["groups"] == visits["history"] and visits["history"][0] > 0 == visits["nothing"][0]


def test_batches_that_were_kept_find_their_prompts_again(tmp_path):
    cfg = config("retire", True, total_steps=STEPS)
    run = Run(tmp_path / "run", cfg).whole()
    order = PromptOrder.of(cfg, MIXED)
    stream = SavedStream(tmp_path / "run" / BATCHES, run.trainer.buffer, order.draw, order.know)
    for version in range(STEPS):
        run.trainer.buffer.version = version
        found = asyncio.run(stream.collect()).groups
        wanted = [group for group in run.used[version] if len(set(group.accuracies)) > 1]
        assert [(g.draw.index, g.draw.prompt.id) for g in found] == [(g.draw.index, g.draw.prompt.id) for g in wanted]
    assert any(PromptOrder.of(cfg, MIXED).draw(g.draw.index).prompt.id != g.draw.prompt.id for g in wanted)
