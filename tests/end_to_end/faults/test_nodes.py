"""A whole run on several nodes, of which two are lost: it waits for another one or goes on with what is left."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dapo.config.compose import compose
from dapo.driver import fleet, run
from dapo.state.run_dir import claim_output_dir
from dapo.workers.training import processes
from tests.end_to_end.faults.test_faults import Undisturbed, assert_undisturbed
from tests.support.nodes import Node, OnNodes
from tests.support.outcomes import RUN, last_line
from tests.support.runs import SMALL, TINY

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1500)]

ENGINES, RANKS = 2, 2
WAIT_S = 600.0


@pytest.fixture
def nodes(ray_cluster: None) -> Iterator[list[Node]]:
    """One with room for an engine, and one for all engines and ranks, which Ray fills first."""
    made = [Node(gpus=1), Node(gpus=ENGINES + RANKS + 1)]
    yield made
    for node in made:
        node.stop()


class Losses(threading.Thread):
    """Kills nodes beside a run, and adds one. notice: a node is told to go before. told: what the run warned of."""

    def __init__(self, nodes: list[Node], output_dir: Path, notice: bool) -> None:
        super().__init__(daemon=True)
        self._notice = notice
        self.nodes = nodes
        self.placement: OnNodes | None = None
        self.told: list[str] = []
        self.failure: BaseException | None = None
        self._log = output_dir / "metrics.jsonl"

    def run(self) -> None:
        try:
            self._kill_and_add()
        except BaseException as error:
            self.failure = error

    def _kill_and_add(self) -> None:
        first, second = self.nodes
        self._until(self._begun if self._notice else lambda: self._steps() >= 1)  # steps are short against a notice
        assert self.placement is not None
        assert self.placement.node_of_ranks() == {second.id}
        if self._notice:
            second.tell(60.0)
            self._until(lambda: self._warned("leaves: its node goes") == ENGINES and self._warned("has joined") > 0)
            self._until(lambda: self._warned("ranks goes: the run saves") == 1 and self._steps() >= 2)
        second.kill()
        self._until(lambda: self._warned("a node is gone") > 0)
        self.nodes.append(Node(gpus=ENGINES - 1 + RANKS))
        if not self._notice:
            self._until(lambda: self._steps() >= 2)
            first.kill()

    def _warned(self, of: str) -> int:
        return sum(of in line for line in self.told)

    def _begun(self) -> bool:
        return (self._log.parent / "tensorboard").exists()

    def _steps(self) -> int:
        return self._log.read_text().count("actor/loss") if self._log.exists() else 0

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self.told
            time.sleep(0.1)


async def unless_failed(work: Coroutine[Any, Any, None], losses: Losses) -> None:
    """Ends a run that would wait for a node that does not come any more."""
    running = asyncio.create_task(work)
    while not running.done():
        await asyncio.wait([running], timeout=1.0)
        if losses.failure is not None:
            running.cancel()
    await running


@pytest.mark.parametrize("notice", [False, True], ids=["lost", "told"])
def test_the_loss_of_nodes_costs_time_and_nothing_else(
    notice: bool,
    undisturbed: Undisturbed,
    nodes: list[Node],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second node takes along all engines and ranks; for one engine there is room on the first, the
    rest waits for a third. Then the first node takes along its engine, for which there is no room any more.
    told: its engines have left before, and the ranks' state is saved."""
    losses = Losses(nodes, tmp_path / "run", notice)

    def place(cfg: Any, device: str, **how: Any) -> OnNodes:
        losses.placement = OnNodes(cfg, device, **how)
        return losses.placement

    monkeypatch.setattr(processes, "_own_space", lambda: "of another machine")
    monkeypatch.setattr(fleet, "Placement", place)
    monkeypatch.setattr(fleet, "warn", losses.told.append)
    monkeypatch.setattr(run, "ray_cluster", lambda cfg: nullcontext())
    losses.start()
    found = tmp_path / "run"
    own = (f"trainer.output_dir={found}", "data.val_files=[]", f"rollout.num_engines={ENGINES}", "trainer.device=cpu")
    saves = ("checkpoint.every=0",) if notice else ()
    cfg = compose([*SMALL, *RUN, *own, *saves], TINY)
    with claim_output_dir(cfg.trainer.output_dir, cfg.checkpoint.resume, asdict(cfg)) as run_dir:
        asyncio.run(unless_failed(run.train(cfg, run_dir, run_dir.store), losses))
    losses.join(timeout=WAIT_S)
    assert losses.failure is None and not losses.is_alive()
    assert losses.placement is not None
    losses.placement.free()
    assert_undisturbed(found, undisturbed)
    last = last_line(found)
    assert last["perf/restarted_actors"] == 1
    if notice:
        assert len(run_dir.store.steps()) == 2, "a save when the ranks' node was told, and one at the end"
    else:
        assert last["perf/restarted_engines"] >= ENGINES
