"""What outlives a file of tests in its process, and ends before files that share nothing with it: memory is short."""

from collections.abc import Callable

_ends: list[Callable[[], None]] = []
_group = ""


def end_with_the_group(end: Callable[[], None]) -> None:
    """end: called whenever the files of another group begin; what it ended may have started again by then."""
    _ends.append(end)


def enter(group: str) -> None:
    """Ends what other files have kept, where these are the first of a group."""
    global _group
    if group != _group:
        _group = group
        for end in _ends:
            end()
