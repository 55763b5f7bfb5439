"""Saves what each step trained on, and reads it back: `batches/step_NNNNNN.parquet` in the output directory.
Groups are saved before the actors add to their rewards, in parallel with the update. `python -m dapo.replay` and runs
with `trainer.only=train` read them. A failed write stops only a run with `trainer.only=rollout`."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from dapo.algorithm.fate import TRAINED
from dapo.algorithm.outcome import classifier, classify
from dapo.config.algorithm import corrects
from dapo.config.derived import response_caps
from dapo.config.schema import Config
from dapo.data.order import PromptOrder
from dapo.ground.clock import PhaseClock
from dapo.ground.console import warn
from dapo.ground.durable import free_space
from dapo.pools import Pools
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.draws import SURPLUS
from dapo.sampling.stream import GroupStream, Traffic, training_sampling
from dapo.state.checkpoint import STEP_NAME
from dapo.state.groups import OtherPrompt, Visits, oldest_policy, read_groups, write_groups
from dapo.types import Collected, Draw, Group

BATCHES = "batches"


class Batches:
    def __init__(
        self, directory: Path, keep: int | None, visits_of: Callable[[Sequence[Group]], Visits] = lambda groups: {}
    ) -> None:
        """keep: number of newest batches to keep; 0: none is written; None: all. visits_of: returns what is needed to
        find the prompts of groups again (`dapo.data.order.PromptOrder`)."""
        self._directory = directory
        self._keep = keep
        self._visits_of = visits_of
        self._writing: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, cfg: Config, output_dir: Path, visits_of: Callable[[Sequence[Group]], Visits]) -> "Batches":
        keep = {"rollout": None, "train": 0}.get(cfg.trainer.only, cfg.checkpoint.batches)
        return cls(output_dir / BATCHES, keep, visits_of)

    async def put(self, step: int, groups: Sequence[Group]) -> None:
        """Begins to write the batch of a step, once the previous batch is written. If all batches are kept, waits for
        this one too, before the step counts, and raises RuntimeError if it cannot be written."""
        await self.written()
        if self._keep != 0:
            visits = self._visits_of(groups)  # now: the update changes the prompt order
            self._writing = asyncio.create_task(self._write_or_tell(step, groups, visits))
        if self._keep is None:
            await self.written()

    async def written(self) -> None:
        running, self._writing = self._writing, None
        if running is not None:
            await running

    async def _write_or_tell(self, step: int, groups: Sequence[Group], visits: Visits) -> None:
        try:
            await asyncio.to_thread(self._write, step, groups, visits)
        except Exception as error:  # of any kind: the run continues without the batch
            why = f"{type(error).__name__}: {error}"
            if self._keep is None:
                raise RuntimeError(
                    f"the batch of step {step} cannot be written to {self._directory} ({why}), and a run that only "
                    "generates makes nothing else; see that the directory can be written to and that there is space "
                    f"({free_space(self._directory.parent)}), and the same command goes on"
                ) from error
            warn(f"the batch of step {step} was not kept for `dapo.replay`: {why}")

    def _write(self, step: int, groups: Sequence[Group], visits: Visits) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = _path(self._directory, step)
        temporary = path.with_suffix(".tmp")
        write_groups(temporary, [(group, step - 1) for group in groups], visits)
        for left in steps_kept(self._directory):
            if left > step:  # of a branch abandoned by resuming
                _path(self._directory, left).unlink()
        temporary.replace(path)
        if self._keep:
            for old in steps_kept(self._directory)[: -self._keep]:
                _path(self._directory, old).unlink()


def _path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}.parquet"


def steps_kept(directory: Path) -> list[int]:
    found = [STEP_NAME.fullmatch(path.stem) for path in directory.glob("step_*.parquet")]
    return sorted(int(name.group(1)) for name in found if name)


def check_age(cfg: Config, last: int) -> None:
    """Raises ValueError if a batch of `data.batches` up to step `last` has tokens of older policies, as in a run that
    only generated, and the loss does not correct for that."""
    if corrects(cfg.algorithm):
        return
    for step in [step for step in reversed(steps_kept(Path(cfg.data.batches))) if step <= last]:
        age = step - 1 - oldest_policy(_path(Path(cfg.data.batches), step), step - 1)
        if age > 0:
            raise ValueError(
                f"`data.batches` ({cfg.data.batches}) has tokens that are {age} updates old at step {step}, and "
                "`algorithm.rollout_correction.mode` (none) does not correct for it; take truncate or mask, or a loss "
                "whose own ratio does (`algorithm.rollout_correction.use_rollout_logprobs=true`)"
            )


class SavedStream:
    """Provides saved batches through the interface of `dapo.sampling.stream.GroupStream`."""

    def __init__(
        self,
        directory: Path,
        buffer: OversamplingBuffer,
        draw: Callable[[int], Draw],
        know: Callable[[Visits], None] = lambda visits: None,
        outcome: Callable[[Group], str] = classify,
    ) -> None:
        """directory: `batches/` of a run. buffer: knows the next step. draw: of an index. know: called with the saved
        result of `visits_of`, if any, before groups are read. outcome: of a group, by its accuracies."""
        self.buffer = buffer
        self.traffic = Traffic()
        self._directory = directory
        self._draw = draw
        self._know = know
        self._outcome = outcome

    async def collect(self) -> Collected:
        """Raises ValueError if the next step has no batch, or if its prompts are not those of its draws in this run."""
        step = self.buffer.version + 1
        groups = tuple(await asyncio.to_thread(self._read, step))
        return Collected(
            drawn=groups,
            groups=groups,
            fates=(TRAINED,) * len(groups),
            outcomes=tuple(map(self._outcome, groups)),
            returned=(),
            why_returned=SURPLUS,
            unfinished=frozenset(),
            lost=(),
            lost_tokens=0,
        )

    def _read(self, step: int) -> list[Group]:
        path = _path(self._directory, step)
        if not path.is_file():
            raise ValueError(f"{self._directory} has no batch of step {step}; it has {steps_kept(self._directory)}")
        try:
            return [group for group, _ in read_groups(path, self._draw, know=self._know, check=True)]
        except OtherPrompt as error:
            raise ValueError(
                f"`data.batches`: {path} answers another prompt than draw {error} of this run has; give the "
                "`data.train_files` or `data.sources`, the `data.shuffle` and the `trainer.seed` of the run that "
                "wrote it, and whatever else decides about its prompts"
            ) from None

    def serving(self, version: int) -> None:
        self.buffer.serving(version)

    async def close(self) -> None: ...


def stream_of(
    cfg: Config,
    order: PromptOrder,
    buffer: OversamplingBuffer,
    pools: Pools,
    clock: PhaseClock,
    *,
    on_filled: Callable[[], None] = lambda: None,
) -> GroupStream | SavedStream:
    if cfg.trainer.only == "train":
        outcome, least = classifier(cfg), cfg.filter_groups.min_scored
        return SavedStream(Path(cfg.data.batches), buffer, order.draw, order.know, lambda group: outcome(group, least))
    sampling = training_sampling(cfg)
    return GroupStream(
        order,
        buffer,
        pools.rollouts,
        pools.rewards,
        sampling,
        seed=cfg.trainer.seed,
        clock=clock,
        lender=pools.lender,
        caps=response_caps(cfg.data.sources),
        on_filled=on_filled,
    )
