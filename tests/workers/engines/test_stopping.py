"""Where a response ends by its stop strings, however many parts it came in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.types import VersionSpan
from dapo.workers.engines.worker import end_of, spans_up_to

LETTERS = st.lists(st.integers(0, 2), max_size=12)


def decode(token_ids: list[int]) -> str:
    """Two letters to a token, so that a stop string may begin and end within one."""
    return "".join(("ab", "ca", "bc")[token] for token in token_ids)


@given(LETTERS, st.lists(st.text("abc", min_size=1, max_size=4), max_size=2))
def test_the_end_is_the_first_token_that_makes_a_stop_string_whole(token_ids: list[int], stop: list[str]) -> None:
    ends = [count for count in range(len(token_ids) + 1) if any(each in decode(token_ids[:count]) for each in stop)]
    assert end_of(token_ids, stop, decode) == (ends[0] if ends else None)


@pytest.mark.parametrize(("end", "kept"), [(0, []), (2, [(3, 0, 2)]), (4, [(3, 0, 4)]), (6, [(3, 0, 4), (5, 4, 6)])])
def test_spans_end_with_the_tokens(end: int, kept: list[tuple[int, int, int]]) -> None:
    spans = [VersionSpan(version=3, start=0, end=4), VersionSpan(version=5, start=4, end=9)]
    assert [(span.version, span.start, span.end) for span in spans_up_to(spans, end)] == kept
