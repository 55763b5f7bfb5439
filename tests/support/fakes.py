"""In-process stand-ins for the remote pools, for tests of the loop; the real ones have `ray` tests of their own."""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import numpy as np

from dapo.pools import Kept, Updated
from dapo.types import (
    Draw,
    Float32Array,
    Group,
    Prompt,
    Request,
    Response,
    Score,
    TrainBatch,
    TrainSequence,
    VersionSpan,
)


def make_prompt(number: int, source: str = "test") -> Prompt:
    text = f"{number}"
    ids = np.array([1, 2, 3 + number % 50], dtype=np.int32)
    messages = (("user", text),)
    return Prompt(
        id=number, source=source, messages=messages, text=text, token_ids=ids, ground_truth=text, extra_info={}
    )


def make_response(length: int = 4, finish_reason: str = "stop", text: str = "", version: int = 0) -> Response:
    return Response(
        token_ids=np.arange(length, dtype=np.int32),
        rollout_logprobs=np.full(length, -1.0, dtype=np.float32),
        text=text,
        finish_reason=finish_reason,
        policy_versions=(VersionSpan(version=version, start=0, end=length),),
        engine=0,
        seconds=0.0,
    )


def make_score(accuracy: float, reward: float | None = None) -> Score:
    value = 2 * accuracy - 1 if reward is None else reward
    return Score(accuracy=accuracy, reward=value, parts={"compute_score": value}, metrics={}, prediction="", failure="")


def make_group(index: int, accuracies: Sequence[float], rewards: Sequence[float] | None = None) -> Group:
    values: Sequence[float | None] = rewards if rewards is not None else [None] * len(accuracies)
    return Group(
        draw=Draw(index=index, prompt=make_prompt(index)),
        responses=tuple(make_response(4 + sample) for sample in range(len(accuracies))),
        scores=tuple(make_score(a, r) for a, r in zip(accuracies, values, strict=True)),
    )


class FakeRollouts:
    """Answers after a random number of event-loop turns; an aborted group ends as far as it is."""

    capacity = 64
    serving = True

    def lap(self) -> dict[str, float]:
        return {"perf/restarted_engines": 1.0}

    def tokens_per_s(self) -> float:
        return 12.5

    def __init__(self, seed: int = 0, max_turns: int = 5) -> None:
        self.seen: list[str] = []
        self.aborted: list[str] = []
        self.version = 0
        self._random = random.Random(seed)
        self._max_turns = max_turns
        self._stop: set[str] = set()

    def room(self, n: int) -> int:
        return self.capacity

    @property
    def spare(self) -> int:
        return self.capacity

    async def generate(self, request: Request) -> AsyncGenerator[tuple[int, Response]]:
        key = request.key
        self.seen.append(key)
        responses = None
        for _ in range(self._random.randint(1, self._max_turns)):
            await asyncio.sleep(0)
            if key in self._stop:
                responses = [make_response(2, "abort")] * request.sampling.n
                break
        # A response depends on its seed alone, as the engine's does.
        for each in enumerate(
            responses or [make_response(3 + seed % 7, text=str(seed), version=self.version) for seed in request.seeds]
        ):
            yield each

    async def abort(self, keys: list[str]) -> None:
        self.aborted += keys
        self._stop.update(keys)


class FakeRewards:
    """`verdict(prompt, sample index, response)` gives the accuracy."""

    def __init__(self, verdict: Callable[[Prompt, int, Response], float]) -> None:
        self._verdict = verdict

    async def score(self, prompt: Prompt, sample: int, response: Response) -> Score:
        await asyncio.sleep(0)
        verdict = self._verdict(prompt, sample, response)
        return make_score(verdict) if not math.isnan(verdict) else make_score(verdict, math.nan)

    def lap(self) -> dict[str, float]:
        return {"perf/restarted_reward_workers": 2.0}

    async def check(self) -> None:
        """Nothing can be wrong with it."""


class FakeActors:
    """Records the batches it is given."""

    def __init__(self) -> None:
        self.batches: list[TrainBatch] = []
        self.saved: list[str] = []
        self.loaded: list[str] = []
        self.restored: list[int] = []
        self.version = self.restarted = 0

    async def update(self, batch: TrainBatch) -> Updated:
        if batch.version != self.version:
            raise RuntimeError(f"the ranks refuse an update of policy version {batch.version}: {self.version}")
        self.batches.append(batch)
        await asyncio.sleep(0)
        self.version += 1
        tokens = sum(len(s.rollout_logprobs) for minibatch in batch.minibatches for s in minibatch)
        metrics = {"loss": 0.0, "response_tokens": float(tokens), "entropy": 1.0, "grad_norm": 1.0}
        return Updated(metrics={f"actor/{name}": value for name, value in metrics.items()})

    async def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
        """A reference policy that is half a nat less sure of every token."""
        return [sequence.rollout_logprobs - np.float32(0.5) for sequence in sequences]

    async def save(self, directory: str, version: int) -> None:
        if version != self.version:
            raise RuntimeError(f"the ranks refuse a checkpoint of policy version {version}: {self.version}")
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / "weights").write_text(str(len(self.batches)))
        self.saved.append(directory)

    async def load(self, directory: str, version: int) -> None:
        self.loaded.append(directory)
        self.version = version

    async def export_hf(self, directory: str) -> None:
        await self.save(directory, self.version)

    async def stage(self, version: int, *, export: bool) -> None:
        if version != self.version:
            raise RuntimeError(f"the ranks refuse a checkpoint of policy version {version}: {self.version}")
        self.staged = str(len(self.batches)), export
        await asyncio.sleep(0)

    async def write_staged(self, directory: str, export: str) -> None:
        text, exports = self.staged
        for folder in (directory, export) if exports else (directory,):
            Path(folder).mkdir()
            (Path(folder) / "weights").write_text(text)
        self.saved.append(directory)

    async def keep(self, version: int) -> Kept:
        if version != self.version:
            raise RuntimeError(f"the ranks refuse a copy of policy version {version}: {self.version}")
        await asyncio.sleep(0)
        return Kept(version=version)

    async def restore(self, kept: Kept) -> str:
        self.restored.append(kept.version)
        self.version = kept.version
        return "own copies"

    async def check_shared(self, path: str, content: str) -> None:
        assert Path(path).read_text() == content

    def restarts(self) -> dict[str, float]:
        return {"perf/restarted_actors": float(self.restarted)}

    async def until_lost(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def restart(self) -> None:
        self.restarted += 1
        self.version = 0
