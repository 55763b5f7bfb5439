"""Knows which policy version a rank's weights are of, and whether they are of one at all.

In: what is about to change them. Out: a refusal of all that needs weights of a version, where they are of another or
half changed. Every rank keeps its own and decides alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from workers.training.unanimous import Refused, Unanimous


class Standing:
    """Holds the policy version of a rank, 0 at first, and what was changing its weights when it failed."""

    def __init__(self) -> None:
        self.version = 0
        self._half_done = ""

    def check(self, what: str, version: int | None = None) -> None:
        """Raises Refused unless the weights are those of a policy version, and of `version` where one is given."""
        if self._half_done:
            raise Refused(
                f"the ranks refuse {what}: {self._half_done} did not come to its end, and their weights are of no "
                "policy version; load a checkpoint"
            )
        if version not in (None, self.version):
            raise Refused(
                f"the ranks refuse {what} of policy version {version}: they are at version {self.version}; load the "
                "checkpoint of that version"
            )

    @contextmanager
    def changing(self, what: str, *, to: int, or_nothing: bool) -> Iterator[None]:
        """Makes the weights those of version `to` at the end, and those of none if the body raises.

        or_nothing: the body raises Unanimous only where it has changed nothing; then they stay as they were.
        """
        before, self._half_done = self._half_done, what
        try:
            yield
        except Unanimous:
            if or_nothing:
                self._half_done = before
            raise
        self.version, self._half_done = to, ""
