"""Counts what an engine does, from vLLM's statistics of each step. The counts since its start are sent to the driver
with every pulse; the driver reports their growth between two training steps as metrics `perf/engine/`."""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import psutil

from dapo.ground.usage import Level, resident_bytes

RECENT_S = 5.0  # averaging window of an engine's current speed


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCounts:
    """What one engine did since its start. Made in its actor, consumed by `Follower`.

    seconds: since the start. tokens: generated. drafts: how often tokens were drafted for a request. drafted, accepted:
    tokens drafted, and of these kept; each draft also yields one token that the engine samples. preemptions: requests
    returned to the queue for lack of KV cache. busy_s: seconds with a running request. running_s, waiting_s, kv_s: time
    integrals of the running requests, the waiting requests and the used share of the KV cache. kv_peak: largest share
    since the last counts. resident_bytes: of its processes, now.
    """

    seconds: float
    tokens: int
    drafts: int
    drafted: int
    accepted: int
    preemptions: int
    busy_s: float
    running_s: float
    waiting_s: float
    kv_s: float
    kv_peak: float
    resident_bytes: int

    def since(self, before: "EngineCounts") -> "EngineCounts":
        """Returns the growth since `before`; kv_peak and resident_bytes are not differences."""
        added = {field.name for field in fields(self)} - {"kv_peak", "resident_bytes"}
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in added})


class EngineMeter:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._began = now, now()
        self._tokens = self._drafts = self._drafted = self._accepted = self._preemptions = self._held = 0
        self._busy, self._running, self._waiting, self._kv = (Level(now) for _ in range(4))
        self._processes = [psutil.Process()]

    def started(self) -> None:
        self._processes += self._processes[0].children(recursive=True)

    def step(self, scheduler: Any, iteration: Any) -> None:
        """Adds the statistics of one engine step; either may be None."""
        if iteration:
            self._tokens += iteration.num_generation_tokens
            held = min(self._held, iteration.num_preempted_reqs)
            self._held -= held
            self._preemptions += iteration.num_preempted_reqs - held
        if scheduler:
            self._busy.set(float(scheduler.num_running_reqs > 0))
            self._running.set(scheduler.num_running_reqs)
            self._waiting.set(scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs)
            self._kv.set(scheduler.kv_cache_usage)
            if drafted := scheduler.spec_decoding_stats:
                self._drafts += drafted.num_drafts
                self._drafted += drafted.num_draft_tokens
                self._accepted += drafted.num_accepted_tokens

    def hold(self) -> None:
        """Records that a weight sync returns all requests to the queue. vLLM counts them as preemptions later."""
        self._held = round(self._running.value)
        self._waiting.add(self._running.value)
        for level in (self._busy, self._running, self._kv):
            level.set(0.0)

    def read(self) -> EngineCounts:
        return EngineCounts(
            seconds=self._now() - self._began,
            tokens=self._tokens,
            drafts=self._drafts,
            drafted=self._drafted,
            accepted=self._accepted,
            preemptions=self._preemptions,
            busy_s=self._busy.area(),
            running_s=self._running.area(),
            waiting_s=self._waiting.area(),
            kv_s=self._kv.area(),
            kv_peak=self._kv.peak(),
            resident_bytes=resident_bytes(self._processes),
        )


class Follower:
    def __init__(self) -> None:
        self._before: EngineCounts | None = None
        self._last: EngineCounts | None = None
        self._kv_peak = 0.0
        self._recent: deque[EngineCounts] = deque()  # of the last `RECENT_S`

    def heard(self, counts: EngineCounts) -> None:
        if self._last is None:
            self._before = counts
        self._last = counts
        self._kv_peak = max(self._kv_peak, counts.kv_peak)
        self._recent.append(counts)
        while counts.seconds - self._recent[0].seconds > RECENT_S:
            self._recent.popleft()

    def tokens_per_s(self) -> float:
        """Returns tokens per second over the last `RECENT_S` of received counts."""
        if len(recent := [*self._recent]) < 2:
            return 0.0
        return (recent[-1].tokens - recent[0].tokens) / max(recent[-1].seconds - recent[0].seconds, 1e-9)

    def lap(self) -> EngineCounts | None:
        """Returns the growth since the last lap; None if no newer counts arrived."""
        before, self._before = self._before, self._last
        kv_peak, self._kv_peak = self._kv_peak, 0.0
        if self._last is None or before is None or self._last.seconds <= before.seconds:
            return None
        return replace(self._last.since(before), kv_peak=kv_peak)


def engine_metrics(
    laps: Mapping[int, EngineCounts], gpus_per_engine: float, lent: Collection[int] = ()
) -> dict[str, float]:
    """Returns the metrics of the engines in `laps`, by number. gpus_per_engine: 0 on a CPU. lent: engines that mostly
    sleep, on the actors' GPUs; they do not count towards `idle`."""
    if not laps:
        return {}
    each = {number: lap.tokens / lap.seconds for number, lap in laps.items()}
    values = laps.values()
    own = [lap for number, lap in laps.items() if number not in lent] or list(values)
    metrics = {
        "perf/engine/tokens_per_s": sum(each.values()),
        "perf/engine/running_mean": sum(lap.running_s / lap.seconds for lap in values),
        "perf/engine/waiting_mean": sum(lap.waiting_s / lap.seconds for lap in values),
        "perf/engine/kv_use_mean": sum(lap.kv_s / lap.seconds for lap in values) / len(laps),
        "perf/engine/kv_use_max": max(lap.kv_peak for lap in values),
        "perf/engine/preemptions": float(sum(lap.preemptions for lap in values)),
        "perf/engine/idle": 1.0 - sum(lap.busy_s / lap.seconds for lap in own) / len(own),
        "perf/engine/resident_bytes": float(max(lap.resident_bytes for lap in values)),
        **{f"perf/engine/{number}/tokens_per_s": rate for number, rate in each.items()},
    }
    if drafted := sum(lap.drafted for lap in values):
        accepted = sum(lap.accepted for lap in values)
        metrics["perf/engine/draft_acceptance"] = accepted / drafted
        metrics["perf/engine/tokens_per_draft"] = 1.0 + accepted / sum(lap.drafts for lap in values)
    if gpus_per_engine:
        metrics["perf/engine/tokens_per_s_per_gpu"] = sum(each.values()) / (len(laps) * gpus_per_engine)
    return metrics
