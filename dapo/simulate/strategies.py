"""Simulates what dapo and others do with a fleet: one function per strategy, a scenario in, what came of it out.

dapo's policy is the buffer of a real run (`dapo.sampling.buffer`); the others are a fixed multiple of the batch behind
a barrier, a refill of one for one, and taking what finishes first. Clock and books are `dapo.simulate.books`'s.
"""

import math

from dapo.sampling.buffer import DRAW_ORDER, OversamplingBuffer
from dapo.simulate.books import Scenario, Simulation, StrategyResult, oracle


def streaming(scenario: Scenario, *, max_staleness: int = 0, admission: str = DRAW_ORDER) -> StrategyResult:
    """Simulates dapo's strategy; at staleness 0 the engines wait for the update, above it they go on."""
    run = Simulation(scenario)
    buffer = OversamplingBuffer(
        train_batch_size=scenario.batch,
        max_in_flight=run.fleet.capacity,  # draws: `room` is the bound
        admission=admission,
        max_staleness=max_staleness,
    )
    oracles = []
    update_end = math.inf
    buffer.open()
    while run.steps < scenario.steps:
        for index in buffer.take(run.room()):
            run.start(index)
        if update_end <= run.next_end:
            run.let_time_pass(update_end)
            run.updated()
            buffer.trained()
            buffer.serving(run.version)
            buffer.open()
            update_end = math.inf
            continue
        finished = run.step()
        if finished is None:
            continue
        buffer.generated(finished, run.attempts[finished].tokens)
        buffer.add(run.group(finished))
        if not buffer.collecting or not buffer.full:
            continue
        collected = buffer.close()
        finished_for_nothing = set(collected.returned) - collected.unfinished
        run.wasted += sum(run.attempts[index].tokens for index in finished_for_nothing)
        buffer.aborted(run.abort(collected.returned))
        run.closed([group.draw.index for group in collected.groups])
        if max_staleness == 0 and admission == DRAW_ORDER:
            used = [run.attempts[group.draw.index] for group in collected.drawn]
            oracles.append(oracle(scenario, used))
        update_end = run.now + scenario.update
    return run.result(oracles)


def barrier(scenario: Scenario, factor: int = 3) -> StrategyResult:
    """Waits for a fixed multiple of the batch; the first mixed groups are trained on, the rest thrown away. Too few:
    the same again."""
    run = Simulation(scenario)
    following = 0
    for _ in range(scenario.steps):
        drawn: list[int] = []
        mixed: list[int] = []
        while len(mixed) < scenario.batch:
            batch = range(following, following + factor * scenario.batch)
            following = batch.stop
            for index in batch:
                run.start(index)
            while run.fleet.in_flight:
                run.step()
            drawn += batch
            mixed += [index for index in batch if run.attempts[index].is_mixed]
        run.closed(mixed[: scenario.batch])
        run.wasted += sum(run.attempts[index].tokens for index in drawn if index > mixed[scenario.batch - 1])
        run.update()
    return run.result()


def refill(scenario: Scenario) -> StrategyResult:
    """Starts a batch of draws; each that turns out useless is replaced by one more."""
    run = Simulation(scenario)
    following = 0
    for _ in range(scenario.steps):
        mixed: list[int] = []
        for index in range(following, following + scenario.batch):
            run.start(index)
        following += scenario.batch
        while len(mixed) < scenario.batch:
            finished = run.step()
            if finished is None:
                continue
            if run.attempts[finished].is_mixed:
                mixed.append(finished)
            else:
                run.start(following)
                following += 1
        run.closed(mixed)
        run.update()
    return run.result()


def refill_in_rounds(scenario: Scenario) -> StrategyResult:
    """Waits for a batch of draws; then for as many as are missing, and so on."""
    run = Simulation(scenario)
    following = 0
    for _ in range(scenario.steps):
        mixed: list[int] = []
        while len(mixed) < scenario.batch:
            batch = range(following, following + scenario.batch - len(mixed))
            following = batch.stop
            for index in batch:
                run.start(index)
            while run.fleet.in_flight:
                run.step()
            mixed += [index for index in batch if run.attempts[index].is_mixed]
        run.closed(mixed)
        run.update()
    return run.result()


def first_finished(scenario: Scenario, factor: int = 3) -> StrategyResult:
    """Starts a fixed multiple of the batch; the mixed groups that finish first are trained on, the rest is cut off. Too
    few: the same again."""
    run = Simulation(scenario)
    following = 0
    for _ in range(scenario.steps):
        mixed: list[int] = []
        running: set[int] = set()
        while len(mixed) < scenario.batch:
            if not running:
                running = set(range(following, following + factor * scenario.batch))
                following += factor * scenario.batch
                for index in sorted(running):
                    run.start(index)
            finished = run.step()
            if finished is None:
                continue
            running.remove(finished)
            if run.attempts[finished].is_mixed:
                mixed.append(finished)
        run.closed(mixed)
        run.abort(running)
        run.update()
    return run.result()
