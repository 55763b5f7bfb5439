"""Runs with evaluations at their side, on engines with few slots and updates that take a while (tests only)."""

from dapo.report.log import read_metrics
from tests.support.driver.loops import make_trainer, tiny_config
from tests.support.fakes import FakeActors, FakeRollouts
from tests.support.faulty_pools import turns

EVALUATED = [0, 2, 4, 5]


class Slots(FakeRollouts):
    """Engines of 12 slots. events: what starts and ends, in order. most_background: responses at once."""

    capacity = 12

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.events: list[str] = []
        self.most_background = 0
        self._left: dict[str, tuple[int, bool]] = {}

    def _load(self, background: bool) -> int:
        return sum(left for left, aside in self._left.values() if background or not aside)

    def room(self, n: int) -> int:
        return max(0, (self.capacity + n - self._load(background=False)) // n)

    @property
    def spare(self) -> int:
        return max(0, self.capacity - self._load(background=True))

    async def generate(self, key, prompt, sampling, seeds, *, background=False, problem=None):
        self._stop.discard(key)  # an abort means the one that runs
        self._left[key] = (sampling.n, background)
        if background:
            self.most_background = max(self.most_background, self._load(True) - self._load(False))
        self.events.append(key)
        try:
            async for each in super().generate(key, prompt, sampling, seeds):
                yield each
        finally:
            del self._left[key]
            self.events.append(f"{key} ended")


class Slow(FakeActors):
    """Takes many turns to update, and tells when."""

    def __init__(self, rollouts: Slots, turns_: int = 300) -> None:
        super().__init__()
        self.rollouts, self.turns = rollouts, turns_

    async def update(self, batch):
        self.rollouts.events.append("update")
        await turns(self.turns)
        self.rollouts.events.append("updated")
        return await super().update(batch)


def made(path, *, seed: int = 0, staleness: int = 0, evaluates: bool = True, total: int = 5, **more):
    cfg = tiny_config(total_steps=total)
    cfg.filter_groups.max_staleness, cfg.checkpoint.every = staleness, 0
    if not evaluates:
        cfg.eval.every, cfg.eval.before_train, cfg.eval.after_train = 0, False, False
    rollouts = more.pop("rollouts", None) or Slots(seed)
    actors = more.pop("actors", None) or Slow(rollouts)
    synced = more.pop("synced", [])
    trainer, _ = make_trainer(path, cfg, rollouts=rollouts, actors=actors, synced=synced, **more)
    return trainer, rollouts, actors


def evaluations(path) -> dict[int, dict]:
    return {line["step"]: line for line in read_metrics(path / "metrics.jsonl") if "eval/accuracy" in line}


def steps_of(path) -> list[dict]:
    lines = [line for line in read_metrics(path / "metrics.jsonl") if "actor/loss" in line]
    return [{k: v for k, v in line.items() if not k.startswith(("perf/", "ledger/"))} for line in lines]
