"""Tracks the policy version of a rank's weights, and refuses calls that need another version or find the weights half
changed. Every rank has its own record, and all decide alike."""

from collections.abc import Iterator
from contextlib import contextmanager

from workers.training.unanimous import Refused, Unanimous


class Standing:
    """The policy version of a rank, 0 at first, and the operation that failed while it changed the weights."""

    def __init__(self) -> None:
        self.version = 0
        self._half_done = ""

    def check(self, what: str, version: int | None = None) -> None:
        """Raises Refused unless the weights are those of a policy version, and of `version` if given."""
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
        """Sets the version to `to` at the end of the block; if it raises, the weights have no version. or_nothing: a
        block that raises Unanimous has changed nothing, and the weights stay as they were."""
        before, self._half_done = self._half_done, what
        try:
            yield
        except Unanimous:
            if or_nothing:
                self._half_done = before
            raise
        self.version, self._half_done = to, ""
