"""Decides which prompt each draw visits.

    draw k ─▶ its source and its rank there (`dapo.data.order`) ─▶ a visit of that source's own order ─▶ a prompt

Without a curriculum the visit is the rank, so the prompt depends only on k. A curriculum (`data.curriculum`) skips
visits by the history of their prompts. Draws run ahead of the scores by an amount that depends on timing. To stay
deterministic, a draw depends only on the groups that the updates so far have used. Draws that were decided but not used
when an update ends are decided again, except draws still in progress (staleness above 0). At staleness 0 the order is
therefore a function of the seed and the scores.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dapo.algorithm.outcome import ALL_CORRECT, classifier, classify
from dapo.config.sampling import DataConfig
from dapo.config.schema import Config
from dapo.types import Draw, Group, Prompt

HISTORY_FILE = "history.parquet"
MAX_RETIRED = 0.9  # share of a source's prompts that `retire` skips at once
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
        pq.write_table(pa.table(columns, schema=_SCHEMA), directory / HISTORY_FILE)

    @classmethod
    def read(cls, directory: Path, prompts: int) -> "PromptHistory":
        """Reads what `write` wrote; without a file, returns an empty history. Raises ValueError if the file cannot be
        read."""
        history, path = cls.empty(prompts), directory / HISTORY_FILE
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


class Curriculum(Protocol):
    def chances(self, history: PromptHistory, prompts: NDArray[np.int64], *, version: int) -> NDArray[np.float64]:
        """Returns the chance of each of `prompts` (ids) at policy `version`. At least one chance is above 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retire:
    """Skips a prompt for `steps` policy versions after its last `after` visits were all solved. If the next visit is
    solved too, the prompt is skipped again. At most the share `most` of the prompts is skipped at once; above that, the
    prompts with the oldest last visit return early."""

    after: int
    steps: int
    most: float

    def chances(self, history: PromptHistory, prompts: NDArray[np.int64], *, version: int) -> NDArray[np.float64]:
        last = history.last_version[prompts]
        away = np.flatnonzero((history.solved[prompts] >= self.after) & (version <= last + self.steps))
        most = min(int(self.most * len(prompts)), len(prompts) - 1)
        newest_last = away[np.argsort(last[away], kind="stable")]
        chances = np.ones(len(prompts))
        chances[newest_last[max(0, len(away) - most) :]] = 0.0
        return chances


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighted:
    """Chance 4 p (1 - p), at least `least`. p is the pass rate smoothed with two extra responses, one of them correct
    (`samples` + 2 in total). A prompt without a visit is not skipped."""

    samples: int
    least: float

    def chances(self, history: PromptHistory, prompts: NDArray[np.int64], *, version: int) -> NDArray[np.float64]:
        p = (history.pass_rate[prompts] * self.samples + 1) / (self.samples + 2)
        return np.where(history.visits[prompts] > 0, np.maximum(4 * p * (1 - p), self.least), 1.0)


def curriculum_of(cfg: DataConfig, samples: int) -> Curriculum | None:
    """samples: responses per group. Returns None for `uniform`."""
    if cfg.curriculum == "retire":
        return Retire(after=cfg.retire_after, steps=cfg.retire_steps, most=MAX_RETIRED)
    if cfg.curriculum == "weighted":
        return Weighted(samples=samples, least=cfg.min_weight)
    return None


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


FILE = "order.json"
CHANCE = 1  # seed word of the random numbers for skipping, separate from the order of an epoch


class Epochs:
    """The order of visits of one source: `permutation(seed, epoch)[visit % num_prompts]`."""

    def __init__(self, prompts: NDArray[np.int64], *, seed: int, source: int, shuffle: bool) -> None:
        """prompts: ids. source: its number; source 0 has the same order as a run without sources."""
        self.prompts = prompts
        self._seed = seed
        self._source = source
        self._shuffle = shuffle
        self._orders: dict[int, NDArray[np.int64]] = {}  # cache of the last epochs

    def __len__(self) -> int:
        return len(self.prompts)

    def places(self, epoch: int) -> NDArray[np.int64]:
        """Returns, for each visit of an epoch, the index of its prompt in `prompts`."""
        if not self._shuffle:
            return np.arange(len(self))
        if epoch not in self._orders:
            # Philox keyed by (seed, epoch): no epoch depends on earlier ones.
            words = [self._seed, epoch, self._source] if self._source else [self._seed, epoch]
            made = _generator(words).permutation(len(self))
            self._orders = {key: order for key, order in self._orders.items() if key == epoch - 1} | {epoch: made}
        return self._orders[epoch]

    def prompt(self, visit: int) -> int:
        epoch, place = divmod(visit, len(self))
        return int(self.prompts[self.places(epoch)[place]])

    def standing(self, epoch: int, chances: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns the visits of an epoch that are not skipped, in order. chances: of each prompt, in [0, 1]."""
        luck = _generator([self._seed, epoch, self._source, CHANCE]).random(len(self))
        return epoch * len(self) + np.flatnonzero(luck < chances[self.places(epoch)])


def _generator(words: list[int]) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


class _Window:
    """The visits of one source that are not skipped, from one visit on, while the chances do not change."""

    def __init__(self, epochs: Epochs, chances: NDArray[np.float64], *, first: int, cursor: int) -> None:
        """first: rank of its first draw. cursor: first visit that it may use."""
        self.first, self.cursor, self.chances = first, cursor, chances
        self._epochs = epochs
        self._epoch = cursor // len(epochs)
        self._visits = np.zeros(0, dtype=np.int64)

    def visit(self, rank: int) -> int:
        while len(self._visits) <= rank - self.first:
            more = self._epochs.standing(self._epoch, self.chances)
            self._visits = np.concatenate([self._visits, more[more >= self.cursor]])
            self._epoch += 1
        return int(self._visits[rank - self.first])

    def after(self, rank: int) -> int:
        return self.visit(rank - 1) + 1 if rank > self.first else self.cursor


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderState:
    """The curriculum's part of a checkpoint. first: the first draw decided by the history. cursors: for each source,
    the visit from which on the history decides. visits: the visits of draws before `first` that have not ended."""

    first: int
    cursors: list[int]
    visits: dict[int, int]


class PromptOrder:
    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        weights: Mapping[str, float] | None = None,
        curriculum: Curriculum | None = None,
        outcome: Callable[[Group], str] = classify,
    ) -> None:
        """prompts: the position of each is its id. weights: of each source by name (`Prompt.entry`); None: one source.
        outcome: the run's filter's classification of a group."""
        self._prompts = prompts
        self._names = list(weights or {"": 1.0})
        self._shares = Shares(list(weights.values()) if weights else [1.0])
        number = {name: source for source, name in enumerate(self._names)}
        of = np.array([number[prompt.entry] if weights else 0 for prompt in prompts], dtype=np.int64)
        self._epochs = [
            Epochs(np.flatnonzero(of == source), seed=seed, source=source, shuffle=shuffle)
            for source in range(len(self._names))
        ]
        self._curriculum = curriculum
        self._outcome = outcome
        self._history = PromptHistory.empty(len(prompts))
        self._metrics: dict[str, float] = {}
        self._windows: list[_Window] = []
        self._open(OrderState(first=0, cursors=[0] * len(self._names), visits={}), version=0)

    @classmethod
    def of(cls, cfg: Config, prompts: Sequence[Prompt]) -> "PromptOrder":
        outcome, least = classifier(cfg), cfg.filter_groups.min_scored
        return cls(
            prompts,
            seed=cfg.trainer.seed,
            shuffle=cfg.data.shuffle,
            weights={source.name: source.weight for source in cfg.data.sources} or None,
            curriculum=curriculum_of(cfg.data, cfg.rollout.n),
            outcome=lambda group: outcome(group, least),
        )

    def draw(self, index: int) -> Draw:
        """Returns draw number `index`, counted from 0 over the whole run."""
        source, rank = self._shares.place(index)
        return Draw(index=index, prompt=self._prompts[self._epochs[source].prompt(self._visit(index, source, rank))])

    def _visit(self, index: int, source: int, rank: int) -> int:
        if index in self._visits:
            return self._visits[index]
        window = self._windows[source] if self._windows else None
        return rank if window is None or rank < window.first else window.visit(rank)

    def _open(self, state: OrderState, *, version: int) -> None:
        self._first, self._visits = state.first, state.visits
        if self._curriculum is None:
            return
        ranks = self._shares.counts(state.first)
        self._windows = [
            _Window(
                epochs,
                self._curriculum.chances(self._history, epochs.prompts, version=version),
                first=rank,
                cursor=cursor,
            )
            for epochs, rank, cursor in zip(self._epochs, ranks, state.cursors, strict=True)
        ]

    def learn(self, groups: Sequence[Group], *, live: Iterable[int], settled: int, version: int) -> None:
        """Adds the groups used by the update to policy `version`. live: draws that have not ended. settled: draws from
        this one on are decided again."""
        if self._curriculum is None:
            self._history.add(groups, version=version - 1, outcome=self._outcome)
            return
        first = max(self._first, settled)
        ranks = self._shares.counts(first)
        cursors = [window.after(rank) for window, rank in zip(self._windows, ranks, strict=True)]
        visits = {index: self._visit(index, *self._shares.place(index)) for index in live if index < first}
        self._metrics = self._describe(ranks, cursors)
        self._history.add(groups, version=version - 1, outcome=self._outcome)
        self._open(OrderState(first=first, cursors=cursors, visits=visits), version=version)

    def _describe(self, ranks: Sequence[int], cursors: Sequence[int]) -> dict[str, float]:
        passed = sum(cursors) - sum(window.cursor for window in self._windows)
        drawn = sum(ranks) - sum(window.first for window in self._windows)
        shares, chances = self.shares(), np.concatenate([window.chances for window in self._windows])
        return {
            "curriculum/effective_prompts": float(1.0 / np.square(shares).sum() / len(shares)),
            "curriculum/retired": float(np.mean(chances == 0)),
            "curriculum/skipped": (passed - drawn) / passed if passed else 0.0,
            "curriculum/visited": float(np.mean(self._history.visits > 0)),
        }

    def shares(self) -> NDArray[np.float64]:
        """Returns for each prompt id its expected share of the draws, given the current history."""
        found = np.zeros(len(self._prompts))
        for source, epochs in enumerate(self._epochs):
            chances = self._windows[source].chances if self._windows else np.ones(len(epochs))
            found[epochs.prompts] = self._shares.parts[source] * chances / chances.sum()
        return found

    def metrics(self) -> dict[str, float]:
        """Returns the curriculum metrics of the last step; empty without a curriculum."""
        return self._metrics

    def visits_of(self, groups: Sequence[Group]) -> dict[int, int]:
        """Returns the visits that `know` needs to find the prompts of these groups again; empty without a
        curriculum."""
        if self._curriculum is None:
            return {}
        return {each.draw.index: self._visit(each.draw.index, *self._shares.place(each.draw.index)) for each in groups}

    def know(self, visits: Mapping[int, int]) -> None:
        self._visits = {**self._visits, **visits}

    def saved(self) -> "SavedOrder":
        """Returns a copy of the state for a checkpoint."""
        cursors = [window.cursor for window in self._windows]
        state = OrderState(first=self._first, cursors=cursors, visits=dict(self._visits))
        return SavedOrder(history=self._history.copy(), state=state if self._windows else None)

    def restore(self, directory: Path, *, version: int) -> None:
        """Restores the state from a checkpoint of policy `version`. Raises ValueError if its files are invalid."""
        history = PromptHistory.read(directory, len(self._prompts))
        decides = self._curriculum is not None and (directory / FILE).is_file()
        state = _read_state(directory / FILE, len(self._names)) if decides else None
        self.take(SavedOrder(history=history, state=state), version=version)

    def take(self, saved: "SavedOrder", *, version: int) -> None:
        """Restores what `saved` has returned at policy `version`."""
        self._history = saved.history.copy()
        if saved.state is not None:
            self._open(saved.state, version=version)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedOrder:
    """The history and, with a curriculum, the order state. Made by `PromptOrder.saved`."""

    history: PromptHistory
    state: OrderState | None

    def write(self, directory: Path) -> None:
        self.history.write(directory)
        if self.state is not None:
            (directory / FILE).write_text(json.dumps(asdict(self.state)) + "\n", encoding="utf-8")


def _read_state(path: Path, sources: int) -> OrderState:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        visits = {int(index): visit for index, visit in values["visits"].items()}
        state = OrderState(first=values["first"], cursors=values["cursors"], visits=visits)
        whole = [state.first, *state.cursors, *visits.values()]
        if len(state.cursors) != sources or not all(type(number) is int and number >= 0 for number in whole):
            raise ValueError(f"{len(state.cursors)} cursors for {sources} sources, or counts that are no whole numbers")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is no order of draws ({error!r}); remove this checkpoint's directory to continue from the one "
            "before it"
        ) from error
    return state
