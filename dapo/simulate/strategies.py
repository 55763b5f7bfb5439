"""Simulates strategies of dapo and others: one function each, from a scenario to its results. dapo's policy is the
buffer of a real run (`dapo.sampling.buffer`). The others are a fixed multiple of the batch behind a barrier, refilling
one for one, and taking what finishes first. `dapo.simulate.books` keeps clock and records."""

import math
from collections.abc import Callable

from dapo.sampling.buffer import DRAW_ORDER, OversamplingBuffer
from dapo.sampling.lending import Lending
from dapo.simulate.books import Scenario, Simulation

FACTOR = 3  # times the batch, for strategies with a fixed number of draws


class Lender:
    """Wakes engines on the actors' GPUs while the batch is far from full, and returns the GPUs when it is full.
    awake_at: when engines that wake now will serve; infinite if none are waking."""

    def __init__(self, run: Simulation, buffer: OversamplingBuffer, lending: Lending | None) -> None:
        self.awake_at = math.inf
        self._run, self._buffer, self._lending = run, buffer, lending
        self._lent = False

    def consider(self) -> None:
        """Starts to wake the engines if `Lending.gain_s` is positive. Pending work is what the batch lacks by the
        demand estimate, plus the queued responses."""
        run, buffer = self._run, self._buffer
        if self._lending is None or self._lent or not buffer.collecting or not run.fleet.ended:
            return
        missing = buffer.missing * run.scenario.workload.n
        response = run.fleet.ended_tokens / run.fleet.ended
        if self._lending.gain_s(missing + run.fleet.queued, response) > 0:
            self._lent = True
            self.awake_at = run.now + self._lending.wake_s

    def wake(self) -> None:
        self.awake_at = math.inf
        self._run.fleet.wake()

    def give_back(self) -> float:
        """Puts the engines to sleep and returns how long that takes; their responses continue on the other engines."""
        if self._lending is None or not self._lent:
            return 0.0
        self._lent, self.awake_at = False, math.inf
        self._run.fleet.sleep()
        return self._lending.sleep_s


def streaming(
    scenario: Scenario,
    *,
    max_staleness: int = 0,
    admission: str = DRAW_ORDER,
    lending: Lending | None = None,
) -> Simulation:
    """Simulates dapo's strategy; at staleness 0 the engines wait for the update, above it they continue. lending: as
    many additional engines, on the actors' GPUs, help when that pays; times in tokens of one slot."""
    run = Simulation(scenario, lent=scenario.engines if lending else 0)
    buffer = OversamplingBuffer(
        train_batch_size=scenario.batch,
        max_in_flight=run.fleet.capacity,  # draws: `room` is the bound
        admission=admission,
        max_staleness=max_staleness,
    )
    lender = Lender(run, buffer, lending)
    update_end = math.inf
    buffer.open()
    while run.version < scenario.steps:
        for index in buffer.take(run.room()):
            run.start(index)
        lender.consider()
        if lender.awake_at <= min(update_end, run.next_end):
            run.let_time_pass(lender.awake_at)
            lender.wake()
            continue
        if update_end <= run.next_end:
            run.let_time_pass(update_end)
            run.updated()
            buffer.trained()
            buffer.serving(run.version)
            buffer.open()
            update_end = math.inf
            continue
        ended = run.step()
        finished = ended.draw
        buffer.verdict(finished, float(run.attempts[finished].right[ended.sample]))
        if not ended.last:
            continue
        buffer.generated(finished, run.attempts[finished].tokens)
        buffer.add(run.group(finished))
        if not buffer.collecting or not buffer.full:
            continue
        collected = buffer.close()
        finished_for_nothing = set(collected.returned) - collected.unfinished
        run.wasted_tokens += sum(run.attempts[index].tokens for index in finished_for_nothing)
        buffer.aborted(run.abort(collected.returned))
        run.closed([group.draw.index for group in collected.groups])
        if max_staleness == 0 and admission == DRAW_ORDER:
            run.add_oracle(run.attempts[group.draw.index] for group in collected.drawn)
        update_end = run.now + lender.give_back() + scenario.update
    return run


def barrier(scenario: Scenario) -> Simulation:
    """Waits for `FACTOR` times the batch, trains on the first mixed groups and drops the rest; repeats if too few."""
    return _in_rounds(scenario, lambda missing: FACTOR * scenario.batch)


def refill_in_rounds(scenario: Scenario) -> Simulation:
    """Waits for a batch of draws; then for as many as are missing, and so on."""
    return _in_rounds(scenario, lambda missing: missing)


def _in_rounds(scenario: Scenario, draws: Callable[[int], int]) -> Simulation:
    """Waits for rounds of draws until a batch is mixed. draws: size of a round, by the number of missing groups."""
    run = Simulation(scenario)
    for _ in range(scenario.steps):
        mixed: list[int] = []
        while len(mixed) < scenario.batch:
            started = run.start_next(draws(scenario.batch - len(mixed)))
            while run.fleet.in_flight:
                run.step()
            mixed += [index for index in started if run.attempts[index].is_mixed]
        run.closed(mixed[: scenario.batch])
        surplus = range(mixed[scenario.batch - 1] + 1, started.stop)
        run.wasted_tokens += sum(run.attempts[index].tokens for index in surplus)
        run.update()
    return run


def refill(scenario: Scenario) -> Simulation:
    """Starts a batch of draws; each useless one is replaced by one more."""
    run = Simulation(scenario)
    for _ in range(scenario.steps):
        mixed: list[int] = []
        run.start_next(scenario.batch)
        while len(mixed) < scenario.batch:
            finished = run.next_finished()
            if run.attempts[finished].is_mixed:
                mixed.append(finished)
            else:
                run.start_next(1)
        run.closed(mixed)
        run.update()
    return run


def first_finished(scenario: Scenario) -> Simulation:
    """Starts `FACTOR` times the batch, trains on the first mixed ones to finish, aborts the rest; repeats if too
    few."""
    run = Simulation(scenario)
    for _ in range(scenario.steps):
        mixed: list[int] = []
        running: set[int] = set()
        while len(mixed) < scenario.batch:
            running = running or set(run.start_next(FACTOR * scenario.batch))
            finished = run.next_finished()
            running.remove(finished)
            if run.attempts[finished].is_mixed:
                mixed.append(finished)
        run.closed(mixed)
        run.abort(running)
        run.update()
    return run
