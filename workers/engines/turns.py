"""Lets engines sleep while the actors train on the same GPUs, as deep as is known to be safe.

In: engines without requests. Out: their memory is free until the next weight sync wakes them, or that of their own
where they are lent GPUs; which level of vLLM's sleep they take, decided by the first comparison with the actors after
it.
"""

from collections.abc import Callable, Sequence

from workers.engines.keeper import Keeper

DEEPEST, LIGHTEST = 2, 1  # levels of vLLM's sleep: without weights, with weights on the host


class Turns:
    """Holds the level. proven: engines that slept at it served what the actors compute."""

    def __init__(self, keeper: Keeper, warn: Callable[[str], None]) -> None:
        self.level = DEEPEST
        self.proven = False
        self._slept = False
        self._keeper = keeper
        self._warn = warn

    async def sleep(self) -> None:
        """Leaves the GPUs to the actors. As long as the level is not proven, every engine is compared with the actors
        before it serves again."""
        if not self.proven:
            for slot in filter(self._keeper.takes_turns, self._keeper.slots):
                slot.proven = False
        self._slept = True
        await self._keeper.rest(self.level)

    async def sleep_lighter(self, why: str) -> bool:
        """Lets the engines sleep again, but keep their weights on the host from now on; returns False where they have
        never slept, have served well after it, or keep them already."""
        if not self._slept or self.proven or self.level == LIGHTEST:
            return False
        self._warn(f"engines keep a copy of their weights on the host while they sleep (level 1): {why}")
        self.level = LIGHTEST
        await self.sleep()
        return True

    def served(self, members: Sequence[int]) -> None:
        """Notes that these engines serve: the GPUs are theirs, and they compute what the actors do. Without any that
        shares GPUs, those that are lent none are not concerned."""
        if self._keeper.lends and not any(self._keeper.slots[number].lent for number in members):
            return
        self.proven |= any(self._keeper.slots[number].rested for number in members)
        self._keeper.turn.set()
