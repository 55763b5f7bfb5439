"""Runs the evaluations of a run beside its training, each finished before the engines get other weights.

    sync to v ─▶ begin(v) ─ ─ free slots, while a batch is collected and trained ─ ─▶ trained(v + 1) ─▶ sync to v + 1

Training draws never wait for an evaluation, but the weight sync does: its results belong to exactly one policy version.
"""

import asyncio
from collections.abc import Callable, Sequence

from dapo.config.derived import lends, shares_gpus
from dapo.config.schema import Config
from dapo.evaluation.held_out import Evaluation
from dapo.evaluation.summary import metrics, summaries
from dapo.ground.clock import PhaseClock
from dapo.ground.console import warn
from dapo.ground.time_limit import TimeLimit
from dapo.pools import Pools
from dapo.report.log import MetricsLogger
from dapo.report.store.schema import UNNAMED
from dapo.types import HeldOut

LOOK_S = 0.5  # between two checks whether an evaluation can still finish


def evaluates_after(version: int, cfg: Config) -> bool:
    every = cfg.eval.every
    return cfg.eval.after_train if version >= cfg.trainer.total_steps else every > 0 and version % every == 0


class Evaluations:
    """Manages the evaluation under way, if any, and knows whether one is still owed."""

    def __init__(
        self,
        held_out: Sequence[HeldOut],
        pools: Pools,
        cfg: Config,
        logger: MetricsLogger,
        *,
        clock: PhaseClock,
        limit: TimeLimit,
        say: Callable[[str], None],
        idle: Callable[[int], bool],
    ) -> None:
        """clock: records, as `evaluation`, the time that a step waits for an evaluation. idle: whether no batch is
        collected at once with this policy version."""
        self._held_out = held_out
        self._pools = pools
        self._cfg = cfg
        self._logger = logger
        self._clock = clock
        self._limit = limit
        self._say = say
        self._idle = idle
        self._owed: int | None = None  # the policy version that has to be evaluated
        self._evaluation: Evaluation | None = None
        self._ending: asyncio.Task[None] | None = None
        self._given_up = False

    @property
    def owed(self) -> bool:
        """Whether the actors' policy has to be evaluated; a run that resumes from its checkpoint does that first."""
        return self._owed is not None

    def owe(self, version: int) -> None:
        self._owed = version if self._held_out else None

    def begin(self, version: int) -> None:
        """Evaluates `version`, which the engines serve, if it is due, in slots that training leaves free."""
        assert self._evaluation is None, "an evaluation begins before the one before it has ended"
        if version == 0 and self._cfg.eval.before_train:
            self.owe(version)
        if self.owed:
            pools = self._pools
            self._evaluation = Evaluation(self._held_out, pools.rollouts, pools.rewards, self._cfg, version=version)
            if self._idle(version):
                self.wake()

    def wake(self) -> None:
        """Uses the slots that are free now; call when the engines have all the training requests they can get."""
        if self._evaluation is not None:
            if self._ending is None:
                self._ending = asyncio.create_task(self._to_its_end(self._evaluation))
            self._evaluation.wake()

    def progress(self) -> tuple[int, int, int] | None:
        """Returns (version, finished answers, all answers) of the evaluation under way; None without one."""
        evaluation = self._evaluation
        return None if evaluation is None else (evaluation.version, *evaluation.progress())

    async def leave_gpus(self) -> None:
        """Puts engines on the actors' GPUs to sleep, after the evaluation if no other engines can continue it."""
        if shares_gpus(self._cfg) and not lends(self._cfg):
            await self._finish(self._impossible)
        if self._pools.leave_gpus is not None:
            with self._clock("sleep"):
                await self._pools.leave_gpus()

    async def trained(self, version: int) -> None:
        """Notes that the actors are at `version`, and waits for the evaluation: the engines get other weights next."""
        self._owed = None
        if evaluates_after(version, self._cfg):
            self.owe(version)
        await self._finish(self._impossible)

    async def finish(self) -> None:
        await self._finish(lambda: False)

    def give_up(self) -> None:
        self._given_up = True

    async def again(self) -> None:
        """Restarts the evaluation under way: its engines may have served wrong weights."""
        if self._evaluation is not None and self._owed is not None:
            await self.close()
            self.begin(self._owed)

    async def close(self) -> None:
        evaluation, ending = self._evaluation, self._ending
        self._evaluation = self._ending = None
        if ending is not None:
            ending.cancel()
            await asyncio.wait([ending])
        if evaluation is not None:
            await evaluation.close()

    async def _finish(self, impossible: Callable[[], bool]) -> None:
        if self._evaluation is None:
            return
        with self._clock("evaluation"):
            self.wake()
            self._evaluation.hurry()
            ending, version = self._ending, self._evaluation.version
            assert ending is not None
            while not ending.done() and not self._given_up and not impossible():
                await asyncio.wait([ending], timeout=LOOK_S)
            if not ending.done():
                warn(f"the evaluation of step {version} was cut short and has no result: the run goes on without it")
            failure = ending.exception() if ending.done() else None
            await self.close()
        if failure is not None:
            raise failure

    def _impossible(self) -> bool:
        """Whether no engine serves or no time is left, now that the actors have other weights."""
        return not self._pools.rollouts.serving or self._limit.is_over("save")

    async def _to_its_end(self, evaluation: Evaluation) -> None:
        answered = await evaluation.answers()
        values = metrics(await asyncio.to_thread(summaries, answered))
        self._logger.log(evaluation.version, values)
        for name, groups in answered.sets.items():
            self._logger.evaluation(evaluation.version, name or UNNAMED, groups)
        if evaluation.version == self._owed:
            self._owed = None
        self._say(f"eval · step {evaluation.version} · held-out accuracy {values['eval/accuracy']:.3f}")
