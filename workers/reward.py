"""Scores responses in reward workers, through a driver-side pool: the weighted reward functions, the overlong penalty
and, if configured, the reward model. A failure of the infrastructure is retried on another worker, then the response is
unscorable (NaN), never zero, which would create mixed groups. Wrong scores of known answers stop the run."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from dapo.config.derived import response_caps
from dapo.config.reward import LimitsConfig, RemoteConfig, RewardConfig
from dapo.config.reward_functions import source_functions
from dapo.config.sampling import SourceConfig
from dapo.ground.usage import Level, resident_bytes
from dapo.ground.watchdog import Member
from dapo.rewards.calling.adapters import CONVERSATION
from dapo.rewards.calling.by_entry import Own, Specs
from dapo.rewards.calling.fork_server import Item
from dapo.rewards.calling.loading import tail, with_judge
from dapo.rewards.calling.sandbox import MAX_FILE_BYTES
from dapo.rewards.overlong import overlong_penalty
from dapo.types import Prompt, Response, Score, unscorable
from dapo.workers.remote import RemoteError, wait
from dapo.workers.scoring.asking import Asking, Judges, RewardModel
from dapo.workers.scoring.children import Children
from dapo.workers.scoring.fleet import Fleet, WorkerLost
from dapo.workers.scoring.verdict import (
    MAX_FAILURES_IN_A_ROW,
    RETRY_PAUSE_S,
    CanaryError,
    KnownMetrics,
    Verdict,
    gave_nothing,
    is_told,
    remedy,
    verdict_of_failure,
)

BATCHING_S = 0.005  # verdicts within this time are returned together
RETRIED_FAILURES = ("wall", "crash")  # not caused by the response; retried once on another worker
CHILDREN = 2  # processes of a worker, one response at a time
ITEMS_PER_CHILD = 64  # at a worker: half of them keep a child busy while a call brings more
TRIES = 2  # of a response that is lost with its worker; a lost node takes several workers
FILES_DIFFER = (
    "the files of `reward.functions` differ from node to node or have changed during the run; give all nodes the same "
    "files, and start a new run for new ones"
)


class RewardWorker:
    """Scores in child processes; call `start` first (not a constructor, because Ray hides a constructor's error)."""

    async def start(
        self, functions: Specs, limits: LimitsConfig, children: int, remote: RemoteConfig, concurrency: int, own: Own
    ) -> dict[str, Any]:
        """Returns the fork server's description of the functions, with `granted`. own: by entry of `data.sources`.
        Raises ValueError, CanaryError: see `Children.start`."""
        self._children = Children(functions, limits, children, remote, concurrency, own=own)
        self._respawned_before = 0
        await self._children.start()
        return {**self._children.about, "granted": self._children.granted}

    async def score(self, items: list[Item]) -> AsyncIterator[list[tuple[int, Verdict]]]:
        """Yields verdicts with their item numbers, as they are ready. Raises CanaryError."""
        done: asyncio.Queue[asyncio.Task[Verdict]] = asyncio.Queue()
        numbers = {asyncio.create_task(self._children.score(item)): number for number, item in enumerate(items)}
        for task in numbers:
            task.add_done_callback(done.put_nowait)
        while numbers:
            part = [await done.get()]
            if len(numbers) > 1:
                await asyncio.sleep(BATCHING_S)
            while not done.empty():
                part.append(done.get_nowait())
            yield [(numbers.pop(task), task.result()) for task in part]

    async def check(self) -> tuple[int, int]:
        """Checks the known answers (see `Children.check`). Returns the number of children replaced since the last
        check, and the resident memory of all processes in bytes."""
        await self._children.check()
        before, self._respawned_before = self._respawned_before, self._children.respawned
        return self._respawned_before - before, resident_bytes(self._children.processes())


class RewardPool:
    """All reward workers. failures: responses by kind of failure, over the whole run."""

    def __init__(
        self,
        options: dict[str, Any],
        cfg: RewardConfig,
        *,
        max_response_length: int,
        sources: Sequence[SourceConfig] = (),
        model: RewardModel | None = None,
        judges: Judges | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """options: Ray options of each worker, from `workers.placement`. max_response_length: tokens. sources: those of
        `data`, which may have their own functions and length limits."""
        self._cfg = cfg
        self._options = options
        self.fleet = Fleet(
            self._create,
            self._start_worker,
            name="reward worker",
            count=cfg.num_workers,
            window=max(ITEMS_PER_CHILD * CHILDREN, 2 * cfg.concurrency),
            timeout_s=cfg.timeout_s,
            timeout_key="reward.timeout_s",
            warn=warn,
        )
        self.failures: Counter[str] = Counter()
        self._respawned_children = self._resident_bytes = 0  # updated at each check
        self.unscored, self._unscored_before = Level(), 0.0  # responses without a verdict, and their integral
        self._scoring_s, self._lapped = 0.0, time.monotonic()
        self._digest = ""
        self._max_response_length = max_response_length
        self._caps, self._own = response_caps(sources), source_functions(sources)
        self._model, self._judges = model, judges
        self._beside = [each for each in (model, judges) if each is not None]
        self._asking = Asking(judges, cfg.remote.patience_s, warn)
        self._warn = warn
        self._reads_last: int | None = None
        self._asks: dict[str, bool] = {"": True}  # whether functions are async, by entry, "" for all others
        self._converses: dict[str, bool] = {"": False}  # whether functions are told the prompt's messages
        self._failed_in_a_row = self._longest_scored = 0
        self._metrics = KnownMetrics()

    async def start(self, start_timeout_s: float) -> str:
        """Waits until every worker has scored the known answers; returns a log line about the limits. Raises
        RemoteError if a reward function cannot be loaded or fails a known answer."""
        starts = [each.start(start_timeout_s) for each in (self.fleet.workers, *self._beside)]
        about = (await asyncio.gather(*starts))[0]
        self._reads_last, self._asks = about["reads_last"], about["asks"]
        self._converses = about["converses"]
        return describe(self._cfg, about)

    async def check(self) -> None:
        """Before an optimizer step: makes every child that scored since its last check score the known answers again.
        Raises RemoteError if one failed; then no verdict can be trusted."""
        found = await self.fleet.check()
        self._respawned_children += sum(replaced for replaced, _ in found)
        self._resident_bytes = max((size for _, size in found), default=0)

    async def score(self, prompt: Prompt, sample: int, response: Response) -> Score:
        """Returns the score of response number `sample` of a prompt. Raises RemoteError if the pool failed its known
        answers, or no response gets a verdict any more."""
        model = None if self._model is None else asyncio.ensure_future(self._model.score(prompt, response))
        self.unscored.add(1)
        try:
            verdict = await self._verdict(prompt, response)
            where = f"prompt {prompt.id} of data source {prompt.source!r}, response {sample}"
            self._watch(verdict, where, response.num_sampled)
            score = self._with_penalty(self._metrics.keep(verdict.score), prompt, response.num_sampled)
            return score if model is None else self._with_model(score, await model)
        finally:
            self.unscored.add(-1)
            if model is not None:
                model.cancel()

    def lap(self) -> dict[str, float]:
        """Returns metrics since the last lap, and the total replacements of workers (including the model's) and child
        processes."""
        fleets = [self.fleet] if self._model is None else [self.fleet, self._model.fleet]
        now, area = time.monotonic(), self.unscored.area()
        seconds = max(now - self._lapped, 1e-9)
        children_s = seconds * self._cfg.num_workers * CHILDREN
        metrics = {
            "perf/restarted_reward_workers": sum(fleet.workers.restarts for fleet in fleets),
            "perf/restarted_reward_children": self._respawned_children,
            **({} if self._judges is None else {"perf/restarted_judges": self._judges.restarts}),
            "perf/reward/queue_mean": (area - self._unscored_before) / seconds,
            "perf/reward/queue_max": self.unscored.peak(),
            "perf/reward/idle": max(0.0, 1.0 - self._scoring_s / children_s),
            "perf/reward/resident_bytes": self._resident_bytes,
        }
        self._unscored_before, self._scoring_s, self._lapped = area, 0.0, now
        return metrics

    def stop(self) -> None:
        for each in (self.fleet.workers, *self._beside):
            each.stop()

    async def _verdict(self, prompt: Prompt, response: Response) -> Verdict:
        asks = self._asks.get(prompt.entry, self._asks[""])
        item = Item(
            source=prompt.source,
            text=tail(response.text, self._reads_last),  # the rest need not be sent
            ground_truth=prompt.ground_truth,
            extra_info={**prompt.extra_info, "num_response_tokens": response.num_sampled}
            | ({"prompt": _last_turn(prompt)} if asks else {})
            | ({CONVERSATION: _messages(prompt)} if self._converses.get(prompt.entry, self._converses[""]) else {}),
            entry=prompt.entry,
        )
        score = partial(self._asking.verdict, score=self._try) if asks else self._try
        verdict, worker = await score(item)
        # At the CPU limit only after all of the wall-clock time, the machine was busy: retry on another worker.
        starved = verdict.score.failure == "cpu" and verdict.wall_s >= self._cfg.limits.wall_s
        if verdict.score.failure in RETRIED_FAILURES or starved:
            await asyncio.sleep(RETRY_PAUSE_S)
            verdict, _ = await score(item, avoid=worker)
        return verdict

    async def _try(self, item: Item, avoid: int = -1) -> tuple[Verdict, int]:
        for left in reversed(range(TRIES)):
            try:
                verdict, worker = await self.fleet.score(item, avoid=avoid)
            except WorkerLost as lost:
                verdict, avoid = verdict_of_failure("crash", str(lost), 0.0), lost.worker
                if left:
                    await asyncio.sleep(RETRY_PAUSE_S)
                continue
            self._scoring_s += verdict.wall_s
            return verdict, worker
        return verdict, avoid

    def _create(self, index: int) -> Any:
        worker: Any = ray.remote(RewardWorker)
        return worker.options(**self._options).remote()

    async def _start_worker(self, worker: Any, index: int, timeout_s: float) -> dict[str, Any]:
        """Returns the worker's description of the functions. Their files must be the same for all workers and the whole
        run."""
        cfg, judge = self._cfg, self._cfg.judge
        remote = replace(cfg.remote, calls_per_minute=cfg.remote.calls_per_minute / cfg.num_workers)
        own = {name: with_judge(specs, judge) for name, specs in self._own.items()}
        functions = with_judge(cfg.functions, judge)
        ref = worker.start.remote(functions, cfg.limits, CHILDREN, remote, cfg.concurrency, own)
        member = Member(role="reward worker", number=index, count=self._cfg.num_workers, act="to start")
        [about] = await wait([ref], timeout_s, member, "rollout.start_timeout_s")
        self._digest = self._digest or about["digest"]
        if about["digest"] != self._digest:
            raise RemoteError(FILES_DIFFER) from CanaryError()
        return about

    def _watch(self, verdict: Verdict, where: str, tokens: int) -> None:
        """Counts and logs failures; raises if all responses fail. tokens: of the response. A failed response longer
        than any with a verdict does not count towards that: it may be too long for a judge, and the longest end
        together."""
        unscorable = math.isnan(verdict.score.accuracy)
        failure, detail = verdict.score.failure, verdict.detail
        if unscorable and not failure:
            failure, detail = "none", gave_nothing(verdict.score)
        if not unscorable:
            self._failed_in_a_row, self._longest_scored = 0, max(tokens, self._longest_scored)
        elif tokens <= self._longest_scored or not self._longest_scored:
            self._failed_in_a_row += 1
        if not failure:
            return
        self.failures[failure] += 1
        count = self.failures[failure]
        outcome = "unscorable" if unscorable else "wrong"
        if is_told(count):
            self._warn(f"reward: {where}: {outcome}: {detail} (`{failure}` number {count})")
        if self._failed_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise RemoteError(
                f"the reward functions gave no verdict on {self._failed_in_a_row} responses in a row; the last was "
                f"{where}: {detail}; {remedy(failure)}"
            )

    def _with_penalty(self, score: Score, prompt: Prompt, tokens: int) -> Score:
        overlong = self._cfg.overlong_buffer
        if not overlong.enable:
            return score
        penalty = overlong_penalty(
            tokens,
            max_response_length=self._caps.get(prompt.entry, self._max_response_length),
            buffer_length=overlong.len,
            penalty_factor=overlong.penalty_factor,
        )
        return replace(score, reward=score.reward + penalty, parts={**score.parts, "overlong": penalty})

    def _with_model(self, score: Score, value: float) -> Score:
        if math.isnan(value):
            return score if score.failure else unscorable("model")
        reward = score.reward + self._cfg.model.weight * value
        return replace(score, reward=reward, parts={**score.parts, "reward_model": value})


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    messages = prompt.messages or (("user", prompt.text),)
    return [{"role": role, "content": content} for role, content in messages]


def _last_turn(prompt: Prompt) -> str:
    """Returns the message that the response answers, before any chat template."""
    return prompt.messages[-1][1] if prompt.messages else prompt.text


def describe(cfg: RewardConfig, about: dict[str, Any]) -> str:
    """Returns limits, concurrency and what is not protected. about: as returned by `RewardWorker.start`."""
    limits, granted = cfg.limits, about["granted"]
    switches = {"processes": limits.allow_processes, "network": limits.allow_network}
    refused = [name for name, allowed in switches.items() if not allowed and name not in granted]
    line = (
        f"reward: {cfg.num_workers} x {CHILDREN} processes, each limited to {limits.cpu_s:g} s "
        f"CPU and {limits.wall_s:g} s a response, {limits.memory_bytes >> 20} MiB above its imports, files of "
        f"{MAX_FILE_BYTES >> 10} KiB"
    )
    if granted:
        line += f", no {' and no '.join(granted)}"
    if refused:
        line += f"; this kernel grants no limit of {' and '.join(refused)} (seccomp)"
    if about["programs"]:
        line += f"; programs of the model: {about['programs']}"
    if about["asynchronous"]:
        line += f"; {', '.join(about['asynchronous'])}: {cfg.concurrency} responses at a time in each worker"
    if about["without_canary"]:
        line += f"; no known answers for {', '.join(about['without_canary'])} (no `canaries` in its module)"
    return line
