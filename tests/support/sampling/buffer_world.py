"""A run around one oversampling buffer, played by a test: engines, verifier, updates, stops, crashes (tests only). It
keeps its own books and compares them with the buffer's at each event.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dapo.algorithm.fate import TRAINED
from dapo.algorithm.outcome import ALL_CORRECT, ALL_WRONG, MIXED
from dapo.sampling.budget import BudgetExhausted
from dapo.sampling.buffer import DRAW_ORDER, OversamplingBuffer
from dapo.sampling.draws import REFUSED, STALE, STOPPED, SURPLUS, State
from dapo.state.driver_state import DriverState
from dapo.state.groups import FILE, note, read_groups, recover, write_groups
from dapo.state.journal import Journal
from dapo.types import Group
from tests.support.fakes import make_group, make_response
from tests.support.sampling.verdicts import ACCURACIES, Verdict, draw_of

IN_GENERATION, IN_REWARD, BUFFERED, TO_RETRY = State.IN_GENERATION, State.IN_REWARD, State.BUFFERED, State.TO_RETRY
TRAINING = State.TRAINING
BASE = {"train_batch_size": 3, "max_in_flight": 8}
PLACES = frozenset(State)
BOOKS = ("version", "where", "size", "since", "lost", "finished", "steps", "closed")


class World:
    """A run around one buffer; `stop` continues it in another one, from files, and `crash` from the last checkpoint and
    the journal."""

    def __init__(self, directory: Path, verdict: Verdict, **options) -> None:
        self.directory, self.verdict, self.options = directory, verdict, {**BASE, **options}
        self.buffer = OversamplingBuffer(**self.options, on_scored=self.hear)
        self.version = self.serving = 0  # completed updates; what the engines serve
        self.where: dict[int, str] = {}  # every draw ever started: where it is, or how it ended
        self.size: dict[int, int] = {}  # tokens of the groups that are complete, or ended
        self.since: dict[int, int] = {}  # policy version at the last start
        self.lost: Counter[str] = Counter()  # tokens of draws that went back
        self.finished: list[int] = []  # buffered, in the order of their verdicts
        self.steps: list[list[int]] = []  # draws that each step used up
        self.closed: list[int] = []  # of the last step, while its update is under way
        self.exhausted = 0  # budgets that ended the run
        self.journal: Journal | None = None  # from the first checkpoint on
        # Draws scored since the last checkpoint, whose groups count after a crash: (version at the start, tokens).
        self.journaled: dict[int, tuple[int, int]] = {}
        self.open()

    def open(self) -> None:
        self.drawn_now = 0
        self.serving = self.version
        self.buffer.open()

    def at(self, *places: str) -> list[int]:
        return sorted(index for index, place in self.where.items() if place in places)

    def outcome(self, index: int) -> str:
        return self.verdict(index, self.since[index])

    def usable(self, index: int) -> bool:
        kinds = {MIXED} if self.options.get("filter_groups", True) else {MIXED, ALL_CORRECT, ALL_WRONG}
        return self.outcome(index) in kinds

    @property
    def in_order(self) -> bool:
        return self.options.get("admission", DRAW_ORDER) == DRAW_ORDER

    @property
    def staleness(self) -> int:
        return self.options.get("max_staleness", 0)

    @property
    def spent(self) -> bool:
        return 0 < self.options.get("max_draws", 0) <= self.drawn_now

    @property
    def counted(self) -> int:
        """Scored draws that count towards the budget of this update also in a run that goes on from here."""
        ended = self.drawn_now - len(self.at(IN_GENERATION, IN_REWARD))
        return 0 if self.staleness else min(ended, len(self.at(BUFFERED)))

    def take(self, room: int | None = None) -> list[int]:
        """Draws that start; a budget that ends also ends the run, which is continued. Never nothing for ever."""
        buffer, running = self.buffer, len(self.at(IN_GENERATION, IN_REWARD))
        assert buffer.in_flight == running
        idle = buffer.collecting and running == 0 and not buffer.full
        try:
            taken = buffer.take(room)
        except BudgetExhausted:
            assert idle and self.spent, "the budget ended too soon"
            self.exhausted += 1
            self.drawn_now = 0  # the run that goes on has a whole budget
            self.stop(through_files=False)
            return []
        if idle and room != 0:
            assert taken or buffer.full, "nothing runs and nothing starts"
        following = [*self.at(TO_RETRY), *range(len(self.where), len(self.where) + len(taken))]
        assert taken == following[: len(taken)], "what went back comes first, then new draws, none left out"
        assert room is None or len(taken) <= room
        assert running + len(taken) <= self.options["max_in_flight"]
        self.drawn_now += len(taken)
        bound = self.options.get("max_draws", 0)
        assert not bound or self.drawn_now <= bound or not set(taken) - set(self.where), "new draws beyond the budget"
        assert buffer.collecting or self.staleness or not taken
        for index in taken:
            self.where[index], self.since[index] = IN_GENERATION, self.serving
        return taken

    def generate(self, index: int) -> None:
        self.where[index] = IN_REWARD
        self.size[index] = self.group(index).num_tokens
        self.buffer.generated(index, self.size[index])

    def score(self, index: int) -> None:
        if self.where[index] == IN_GENERATION:
            self.generate(index)
        self.where[index] = BUFFERED
        self.finished.append(index)
        for accuracy in ACCURACIES[self.outcome(index)]:
            self.buffer.verdict(index, accuracy)
        self.buffer.add(self.group(index))
        if self.journal is not None and self.since[index] <= self.journal.version:
            self.journaled[index] = self.since[index], self.size[index]

    def group(self, index: int) -> Group:
        group = make_group(index, ACCURACIES[self.outcome(index)])
        length = 1 + (7 * index + self.since[index]) % 13
        version = self.since[index]
        return replace(group, responses=tuple(make_response(length + sample, version=version) for sample in range(2)))

    def late(self, index: int) -> None:
        """A result of a draw that went back or ended."""
        held = self.buffer.held()
        self.buffer.generated(index, 5)
        self.buffer.verdict(index, 1.0)
        self.buffer.add(make_group(index, [1.0, 0.0]))
        assert [group for group, _ in self.buffer.held()] == [group for group, _ in held]

    def close(self) -> None:
        """The batch goes to the update; it must be what the rules say."""
        used = self.rightful()
        trained = [index for index in used if self.usable(index)]
        oldest = self.version + 1 - self.staleness
        living = [i for i in self.at(IN_GENERATION, IN_REWARD, BUFFERED) if i not in used]
        back = [index for index in living if self.since[index] < oldest]
        collected = self.buffer.close()
        assert [group.draw.index for group in collected.drawn] == used
        assert [group.draw.index for group in collected.groups] == trained
        assert all(group.num_tokens == self.size[group.draw.index] for group in collected.drawn)
        assert 0 <= min(self.version - self.since[index] for index in trained)
        assert max(self.version - self.since[index] for index in trained) <= self.staleness
        assert collected.outcomes == tuple(self.outcome(index) for index in used)
        assert list(collected.returned) == back
        assert collected.lost_tokens == sum(self.size.get(index, 0) for index in back)
        assert collected.unfinished == {index for index in back if self.where[index] == IN_GENERATION}
        assert all(self.where[index] == BUFFERED for index in used), "used up twice"
        reason = STALE if self.staleness else SURPLUS
        self.closed = used
        self.steps.append(used)
        self.send_back(back, reason)
        self.finished = [index for index in self.finished if self.where[index] == BUFFERED and index not in used]
        self.audit()
        partial = 3 * len(collected.unfinished)
        self.lost[reason] += partial
        self.buffer.aborted(partial)

    def rightful(self) -> list[int]:
        """The draws that a full step uses up, in draw order. Fewer than a batch only where the budget is spent."""
        wanted = self.options["train_batch_size"]
        if self.in_order:
            used: list[int] = []
            following = sum(len(step) for step in self.steps)
            while self.where.get(following) == BUFFERED and sum(map(self.usable, used)) < wanted:
                used.append(following)
                following += 1
        else:
            first = [index for index in self.finished if self.usable(index)][:wanted]
            used = sorted(first + [index for index in self.finished if not self.usable(index)])
        found = sum(map(self.usable, used))
        assert found == wanted or (found and self.spent and self.options.get("on_budget") == "train_partial")
        return used

    def send_back(self, indices: list[int], reason: str) -> None:
        for index in indices:
            self.lost[reason] += self.size.pop(index, 0)
            self.where[index] = TO_RETRY

    def update(self) -> None:
        """The next part of an update: it is done, the engines serve its weights, the next batch is collected."""
        if self.closed:
            for index in self.closed:
                self.where[index] = TRAINED if self.usable(index) else self.outcome(index)
            self.closed = []
            self.version += 1
            self.buffer.trained()
        elif self.serving < self.version:
            self.serving = self.version
            self.buffer.serving(self.version)
        elif not self.buffer.collecting:
            self.open()

    def refuse(self) -> None:
        """The actors refuse the closed batch: nothing was trained, and all that it used up comes again."""
        self.send_back(self.closed, REFUSED)
        self.closed = []
        self.steps.pop()
        self.buffer.refused()

    def stop(self, *, through_files: bool = True, **changes) -> None:
        """The run ends and is continued, with other options where that is asked for. A batch that was not trained on
        comes again."""
        state, held = DriverState(version=self.version, buffer=self.buffer.state()), self.buffer.held()
        counted = self.counted
        if through_files:
            write_groups(self.directory / FILE, held)
            state.write(self.directory)
            state = DriverState.read(self.directory)
            held = read_groups(self.directory / FILE, draw_of)
        self.options |= changes
        self.buffer = OversamplingBuffer(**self.options, on_scored=self.hear)
        self.buffer.restore(state.buffer, held, version=state.version)
        self.forget_the_unscored()
        self.audit()
        self.open()
        self.drawn_now = 0 if self.staleness else counted
        if self.journal is not None:
            self.checkpoint()

    def forget_the_unscored(self) -> None:
        """What a stop does to the draws: those held are there again, a batch that was not trained on among them."""
        self.send_back(self.at(IN_GENERATION, IN_REWARD), STOPPED)
        reason = STALE if self.staleness else SURPLUS
        self.send_back([i for i in self.at(BUFFERED) if self.version - self.since[i] > self.staleness], reason)
        self.finished = self.at(BUFFERED)
        if self.closed:
            self.closed = []
            self.steps.pop()
        found = [(group.draw.index, since, group.num_tokens) for group, since in self.buffer.held()]
        assert found == [(index, self.since[index], self.size[index]) for index in self.finished]

    def audit(self) -> None:
        """Every draw is where the world saw it last, with its tokens, and so is what has ended or was lost."""
        draws = self.buffer.draws
        update = {index: TRAINING for index in self.closed}
        ended = {index: fate for index, fate in self.where.items() if fate not in PLACES}
        places = {index: place for index, place in (self.where | update).items() if index not in ended}
        assert {index: draw.state for index, draw in draws.live.items()} == places
        assert {index: draw.tokens for index, draw in draws.live.items()} == {i: self.size.get(i, 0) for i in places}
        assert +draws.counts == Counter(places.values()) + Counter(ended.values())
        assert draws.drawn == len(self.where) and self.buffer.in_flight == len(self.at(IN_GENERATION, IN_REWARD))
        tokens = Counter(self.lost)
        for index, fate in ended.items():
            tokens[fate] += self.size[index]
        assert +draws.tokens == +tokens
        assert draws.generated_tokens == self.lost.total() + sum(self.size.values())

    def run(self, picks: Iterator[int], *, until: int, at_most: int) -> None:
        """Goes on by itself, until so many steps are done or for so many groups; picks: which one finishes next."""
        for _ in range(at_most):
            if self.buffer.collecting and self.buffer.full:
                self.close()
            if len(self.steps) >= until:
                return
            while not self.buffer.collecting:
                self.update()
            self.take()
            running = self.at(IN_GENERATION, IN_REWARD)
            if running:
                self.score(running[next(picks) % len(running)])
            self.audit()

    def checkpoint(self) -> None:
        """Captures the state; what is scored from now on goes into the journal until the next one."""
        if self.journal is None:
            self.journal = Journal(self.directory, "", warn=print)
            self.journal.restart(self.version, [])
        if self.journal.version != self.version:
            self.journal.begin(self.version)
            self.journaled = {}
        self.saved = copy.deepcopy([getattr(self, name) for name in BOOKS])
        self.saved_state, self.saved_groups = self.buffer.state(), self.buffer.held()
        self.saved_counted = self.counted

    def hear(self, group: Group, started: int) -> None:
        if self.journal is not None:
            note(self.journal, group, started)

    def crash(self) -> None:
        """The process dies; another one goes on from the last checkpoint with the groups that finished after it."""
        self.close_journal()
        for name, value in zip(BOOKS, copy.deepcopy(self.saved), strict=True):
            setattr(self, name, value)
        self.serving = self.version
        self.journal = Journal(self.directory, "", warn=print)
        groups = recover(self.journal, self.saved_state, len(self.saved_groups), draw_of, version=self.version)
        awaited = {None, IN_GENERATION, IN_REWARD, TO_RETRY}
        self.journaled = due = {i: found for i, found in self.journaled.items() if self.where.get(i) in awaited}
        assert {group.draw.index: (started, group.num_tokens) for group, started in groups} == due
        self.buffer = OversamplingBuffer(**self.options, on_scored=self.hear)
        self.buffer.restore(self.saved_state, self.saved_groups, groups, version=self.version)
        self.send_back(self.at(IN_GENERATION, IN_REWARD), STOPPED)
        self.where |= dict.fromkeys(range(len(self.where), max(due, default=-1) + 1), TO_RETRY)
        for index, (started, tokens) in due.items():
            self.where[index], self.since[index], self.size[index] = BUFFERED, started, tokens
        self.forget_the_unscored()
        self.finished.sort(key=lambda index: index in due)  # those of the checkpoint came first
        self.audit()
        self.open()
        self.drawn_now = 0 if self.staleness else self.saved_counted + len(due)

    def close_journal(self) -> None:
        assert self.journal is not None
        self.journal.close()
