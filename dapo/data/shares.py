"""Deals draws out to sources: the number of a draw and the weights in, the source and how many it had before out.

Every source gets its share of each stretch of draws, to within one draw per source, and no memory is needed for it.
"""

from collections.abc import Sequence
from fractions import Fraction


class Shares:
    """Splits the draws by weight: the first source takes its part evenly out of all of them, the second its part out of
    the rest, and so on. The arithmetic is exact, so that any machine deals alike at any draw.

    parts: the share of each source.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Takes one positive weight per source; only their ratios count."""
        exact = [Fraction(str(weight)) for weight in weights]
        self._parts = [weight / sum(exact[number:]) for number, weight in enumerate(exact)]  # of what is left
        self.parts = [float(weight / sum(exact)) for weight in exact]  # of all

    def place(self, index: int) -> tuple[int, int]:
        """Returns the source of draw `index`, and its rank: how many draws went to this source before it."""
        left = index  # draws before it that went to the sources from here on
        for source, part in enumerate(self._parts):
            taken = left * part.numerator // part.denominator
            if (left + 1) * part.numerator // part.denominator > taken:
                return source, taken
            left -= taken
        raise AssertionError("the last source takes all that is left")

    def counts(self, draws: int) -> list[int]:
        """Counts how many of the first `draws` go to each source."""
        found = []
        for part in self._parts:
            found.append(draws * part.numerator // part.denominator)
            draws -= found[-1]
        return found
