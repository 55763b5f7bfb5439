"""Assigns draws to sources by weight, without keeping state."""

from collections.abc import Sequence
from fractions import Fraction


class Shares:
    """Splits the draws by weight: the first source takes its part evenly out of all draws, the second its part out of
    the rest, and so on. Every stretch of draws has each source's share (`parts`), to within one draw per source. The
    arithmetic is exact, so the result is the same on every machine."""

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        self._parts = [weight / sum(exact[number:]) for number, weight in enumerate(exact)]  # of the remaining
        self.parts = [float(weight / sum(exact)) for weight in exact]  # of all

    def place(self, index: int) -> tuple[int, int]:
        """Returns the source of draw `index` and its rank: how many earlier draws went to this source."""
        left = index  # earlier draws that went to this source or a later one
        for source, part in enumerate(self._parts):
            taken = left * part.numerator // part.denominator
            if (left + 1) * part.numerator // part.denominator > taken:
                return source, taken
            left -= taken
        raise AssertionError("the last source takes all that is left")

    def counts(self, draws: int) -> list[int]:
        found = []
        for part in self._parts:
            found.append(draws * part.numerator // part.denominator)
            draws -= found[-1]
        return found
