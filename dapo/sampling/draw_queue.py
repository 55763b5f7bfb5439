"""Which draw starts next: those that went back to the stream first, then new ones (DESIGN section 4).

In: draws that go back. Out: indices, the lowest first, so that no prompt is skipped and the draw order has few gaps.
"""

import heapq
from collections.abc import Iterable


class DrawQueue:
    """Indices of draws that are neither in flight nor finished.

    fresh: no draw from here on is in flight, finished or used up. reached: no draw from here on was ever started.
    gaps: draws before `fresh` that went back, a heap.
    """

    def __init__(self, *, fresh: int = 0, reached: int = 0, gaps: Iterable[int] = ()) -> None:
        self.fresh = fresh
        self.reached = reached
        self.gaps: list[int] = []
        self.put_back(gaps)

    def pop(self) -> int:
        """The next draw to start."""
        if self.gaps:
            return heapq.heappop(self.gaps)
        index = self.fresh
        self.fresh += 1
        self.reached = max(self.reached, self.fresh)
        return index

    def put_back(self, indices: Iterable[int]) -> None:
        """These draws are to be started again. A tail of draws that all went back counts as not drawn."""
        gone = {*self.gaps, *indices}
        while self.fresh - 1 in gone:
            self.fresh -= 1
            gone.remove(self.fresh)
        self.gaps = sorted(gone)  # sorted is a heap

    def copy(self) -> "DrawQueue":
        """Another one that stands at the same point."""
        return DrawQueue(fresh=self.fresh, reached=self.reached, gaps=self.gaps)

    @property
    def to_retry(self) -> list[int]:
        """Draws that were started before and are to be started again."""
        return [*self.gaps, *range(self.fresh, self.reached)]
