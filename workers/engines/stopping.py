"""Ends a response at its first stop string. An engine looks for stop strings only in tokens it samples itself, so it
misses one that starts in the prompt of a resumed response."""

from collections.abc import Callable, Sequence

from dapo.types import VersionSpan


def end_of(token_ids: Sequence[int], stop: Sequence[str], decode: Callable[[list[int]], str]) -> int | None:
    """Returns how many of the tokens are needed to contain a whole stop string; None if there is none. decode: returns
    the text of tokens; called about log2(len(token_ids)) times."""
    holds = lambda count: any(each in decode(list(token_ids[:count])) for each in stop)  # noqa: E731
    if not stop or not holds(len(token_ids)):
        return None
    without, found = 0, len(token_ids)
    while found - without > 1:
        middle = (without + found) // 2
        without, found = (without, middle) if holds(middle) else (middle, found)
    return found


def spans_up_to(spans: Sequence[VersionSpan], end: int) -> tuple[VersionSpan, ...]:
    """Returns the spans, clipped to the first `end` tokens."""
    kept = (span for span in spans if span.start < end)
    return tuple(VersionSpan(version=span.version, start=span.start, end=min(span.end, end)) for span in kept)
