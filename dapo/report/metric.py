"""Says what a metric is, and a family of them: the records of the reference in `names.py`.

In: nothing. Out: `Metric`, `Family`. A word in braces stands for what a person named, a reward function or a source, or
for a number.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """Holds one metric. name: without its group; braces as in the module's docstring. unit: empty for a pure number.
    also: the names in verl, TRL or published guides, with a comma between several."""

    name: str
    unit: str
    about: str
    also: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """Holds the metrics whose names begin with `prefix`. over: what they describe. where: the file that makes them."""

    prefix: str
    over: str
    where: str
    metrics: tuple[Metric, ...]

    def names(self) -> Iterator[str]:
        """Yields the whole names."""
        for metric in self.metrics:
            yield f"{self.prefix}/{metric.name}"
