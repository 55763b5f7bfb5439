"""Continues a run when its actors are lost, and saves what was trained however the run ends.

    make a Session ─▶ run ─▶ done
         ▲             │ ActorsLost: ranks died, hang, or have different states
         └── restart ◀─┘ of all ranks; the new one continues from the memory of the nodes or the newest checkpoint, and
                         the journal, without a batch that has lost the ranks twice (`dapo.driver.refusals`)

Engines and reward workers replace their own processes (`workers.rollout`, `workers.reward`) and stay up meanwhile.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from dapo.driver.session import Session
from dapo.ground.console import say, warn
from dapo.ground.restarts import Restarts
from dapo.ground.signals import finish
from dapo.pools import ActorPool, ActorsLost


async def run_to_end(make: Callable[[], Session], actors: ActorPool, max_restarts: int) -> None:
    """Trains to the last step. max_restarts: of all ranks, within an hour or until a new step is trained.

    A signal does not interrupt the last save, nor hide why the run ends; the second signal ends the process.
    Raises:
        ActorsLost: they were lost more often (`actor.max_restarts`).
    """
    restarts, furthest, near = Restarts(max_restarts), 0, None
    while True:
        session = make()
        session.saver.near = near
        try:
            await session.run()
            return
        except ActorsLost as error:
            await session.saver.abandon()
            session.saver.close()
            near = session.saver.near
            if session.version > furthest:  # steps between the checkpoint and the last loss were trained again alike
                restarts.worked()
                furthest = session.version
            await _restart(actors, error, restarts)
        except BaseException:
            if session.saver.is_behind(session.version):
                with suppress(asyncio.CancelledError):  # the first error stays
                    await finish(save_what_was_trained(session))
            raise
        finally:
            session.saver.close()


async def _restart(actors: ActorPool, why: Exception, restarts: Restarts) -> None:
    """Restarts all ranks; a failed start counts as one more loss."""
    while True:
        if restarts.spent():
            raise ActorsLost(
                f"{why}; the ranks were started again {restarts.count()} times within an hour or without a new step, "
                "as often as `actor.max_restarts` allows; the same command goes on from the newest checkpoint"
            ) from why
        restarts.add()
        count = f"{restarts.count()} of {restarts.most} within an hour or without a new step"
        warn(f"the actors are lost and start again ({count}): {why}")
        try:
            await actors.restart()
        except RuntimeError as error:
            why = error
            continue
        say("the actors are back")
        return


async def save_what_was_trained(session: Session) -> None:
    """Saves at the end of a failed or interrupted run. A failure is only reported, not to hide the first one."""
    try:
        await session.save()
        say(f"saved step {session.version}")
    except Exception as error:
        warn(f"step {session.version} could not be saved: {error}")
