"""Records the results of each prompt: visits and pass rates, from the groups used by updates. `dapo.data.order` depends
on it, so every checkpoint contains it as `history.parquet`, one row per visited prompt."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dapo.sampling.outcome import ALL_CORRECT
from dapo.types import Group

FILE = "history.parquet"
NEWEST = 0.5  # minimum weight of the newest visit in pass rate and variance: older visits are from older policies
_SCHEMA = pa.schema(
    {
        "prompt": pa.int64(),
        "visits": pa.int64(),
        "pass_rate": pa.float64(),
        "variance": pa.float64(),
        "solved": pa.int64(),
        "last_version": pa.int64(),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptHistory:
    """Arrays with one value per prompt, indexed by prompt id. visits: groups used for an update that could be scored.
    pass_rate: mean accuracy of the visits, newer visits weighted more (`NEWEST`). variance: the same mean of the
    variance within a group. solved: number of latest consecutive visits that the run's filter classifies as all
    correct. last_version: policy version from which the update after the last visit started; -1 without a visit."""

    visits: NDArray[np.int64]
    pass_rate: NDArray[np.float64]
    variance: NDArray[np.float64]
    solved: NDArray[np.int64]
    last_version: NDArray[np.int64]

    @classmethod
    def empty(cls, prompts: int) -> "PromptHistory":
        whole, real = np.zeros(prompts, dtype=np.int64), np.zeros(prompts)
        return cls(
            visits=whole, pass_rate=real, variance=real.copy(), solved=whole.copy(), last_version=np.full(prompts, -1)
        )

    def copy(self) -> "PromptHistory":
        return deepcopy(self)

    def add(self, groups: Sequence[Group], *, version: int, outcome: Callable[[Group], str]) -> None:
        """Adds the visits of one update, which started from policy `version`, in the order of `groups`. Groups that
        cannot be scored are ignored. outcome: the run's filter's classification of a group."""
        for group in groups:
            accuracies = group.accuracies
            if not accuracies:
                continue
            prompt = group.draw.prompt.id
            self.visits[prompt] += 1
            newest = max(1.0 / self.visits[prompt], NEWEST)
            self.pass_rate[prompt] += newest * (float(np.mean(accuracies)) - self.pass_rate[prompt])
            self.variance[prompt] += newest * (float(np.var(accuracies)) - self.variance[prompt])
            self.solved[prompt] = self.solved[prompt] + 1 if outcome(group) == ALL_CORRECT else 0
            self.last_version[prompt] = version

    def write(self, directory: Path) -> None:
        visited = np.flatnonzero(self.visits)
        columns = [visited, *(getattr(self, name)[visited] for name in _SCHEMA.names[1:])]
        pq.write_table(pa.table(columns, schema=_SCHEMA), directory / FILE)

    @classmethod
    def read(cls, directory: Path, prompts: int) -> "PromptHistory":
        """Reads what `write` wrote; without a file, returns an empty history. Raises ValueError if the file cannot be
        read."""
        history, path = cls.empty(prompts), directory / FILE
        if not path.is_file():
            return history
        try:
            table = pq.read_table(path, schema=_SCHEMA)
            visited = table["prompt"].to_numpy()
            for name in _SCHEMA.names[1:]:
                getattr(history, name)[visited] = table[name].to_numpy()
        except (pa.ArrowException, OSError, IndexError, ValueError) as error:
            raise ValueError(
                f"{path} is no history of {prompts} prompts ({error}); remove this checkpoint's directory to continue "
                "from the one before it"
            ) from error
        return history
