"""What dapo and others do on a simulated fleet: one function per policy, a plan in, what came of it out.

dapo's policy is the buffer of a real run (`dapo.sampling.buffer`); the others are a fixed multiple of the batch behind
a barrier, a refill of one for one, and taking what finishes first. Clock and books are `dapo.simulate.books`'s.
"""

import math

from dapo.sampling.buffer import DRAW_ORDER, OversamplingBuffer
from dapo.simulate.books import Outcome, Plan, Run, oracle


def streaming(plan: Plan, *, max_staleness: int = 0, admission: str = DRAW_ORDER) -> Outcome:
    """dapo's policy; at staleness 0 the engines wait for the update, above it they go on."""
    run = Run(plan)
    buffer = OversamplingBuffer(
        train_batch_size=plan.batch,
        max_in_flight=run.fleet.capacity,  # draws: `room` is the bound
        admission=admission,
        max_staleness=max_staleness,
    )
    oracles = []
    update_end = math.inf
    buffer.open(0)
    while run.steps < plan.steps:
        for index in buffer.take(run.room()):
            run.start(index)
        if update_end <= run.next_end:
            run.let_time_pass(update_end)
            run.updated()
            buffer.trained()
            buffer.open(run.version)
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
            oracles.append(oracle(plan, used))
        update_end = run.now + plan.update
    return run.outcome(oracles)


def barrier(plan: Plan, factor: int = 3) -> Outcome:
    """A fixed multiple of the batch, all of it waited for; the first mixed groups are trained on, the rest thrown away.
    Too few: the same again."""
    run = Run(plan)
    following = 0
    for _ in range(plan.steps):
        drawn: list[int] = []
        mixed: list[int] = []
        while len(mixed) < plan.batch:
            batch = range(following, following + factor * plan.batch)
            following = batch.stop
            for index in batch:
                run.start(index)
            while run.fleet.in_flight:
                run.step()
            drawn += batch
            mixed += [index for index in batch if run.attempts[index].is_mixed]
        run.closed(mixed[: plan.batch])
        run.wasted += sum(run.attempts[index].tokens for index in drawn if index > mixed[plan.batch - 1])
        run.update()
    return run.outcome()


def refill(plan: Plan) -> Outcome:
    """A batch of draws; each that turns out useless is replaced by one more."""
    run = Run(plan)
    following = 0
    for _ in range(plan.steps):
        mixed: list[int] = []
        for index in range(following, following + plan.batch):
            run.start(index)
        following += plan.batch
        while len(mixed) < plan.batch:
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
    return run.outcome()


def refill_in_rounds(plan: Plan) -> Outcome:
    """A batch of draws, all of it waited for; then as many as are missing, and so on."""
    run = Run(plan)
    following = 0
    for _ in range(plan.steps):
        mixed: list[int] = []
        while len(mixed) < plan.batch:
            batch = range(following, following + plan.batch - len(mixed))
            following = batch.stop
            for index in batch:
                run.start(index)
            while run.fleet.in_flight:
                run.step()
            mixed += [index for index in batch if run.attempts[index].is_mixed]
        run.closed(mixed)
        run.update()
    return run.outcome()


def first_finished(plan: Plan, factor: int = 3) -> Outcome:
    """A fixed multiple of the batch at once; the mixed groups that finish first are trained on, the rest is cut off.
    Too few: the same again."""
    run = Run(plan)
    following = 0
    for _ in range(plan.steps):
        mixed: list[int] = []
        running: set[int] = set()
        while len(mixed) < plan.batch:
            if not running:
                running = set(range(following, following + factor * plan.batch))
                following += factor * plan.batch
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
    return run.outcome()
