"""A run around one oversampling buffer whose process dies: `World` with checkpoints and a journal (tests only)."""

import copy
from pathlib import Path
from typing import Any

from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.draws import STOPPED
from dapo.sampling.journaled import note, recover
from dapo.state.journal import Journal
from tests.support.sampling.buffer_world import BUFFERED, IN_GENERATION, IN_REWARD, TO_RETRY, World
from tests.support.sampling.verdicts import Verdict, draw_of


class JournaledWorld(World):
    """A run that also goes on, by `crash`, from the last checkpoint and the journal."""

    BOOKS = ("version", "where", "size", "since", "lost", "finished", "steps", "closed")

    def __init__(self, directory: Path, verdict: Verdict, **options: Any) -> None:
        super().__init__(directory, verdict, **options)
        self.journal: Journal | None = None
        # Draws scored since the last checkpoint, whose groups count after a crash: (version at the start, tokens).
        self.journaled: dict[int, tuple[int, int]] = {}

    def score(self, index: int) -> None:
        super().score(index)
        if self.journal is not None and self.since[index] <= self.journal.version:
            self.journaled[index] = self.since[index], self.size[index]

    def stop(self, *, through_files: bool = True, **changes: Any) -> None:
        super().stop(through_files=through_files, **changes)
        if self.journal is not None:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Captures the state; what is scored from now on goes into the journal until the next one."""
        if self.journal is None:
            self.journal = Journal(self.directory, "", warn=print)
            self.journal.restart(self.version, [])
        if self.journal.version != self.version:
            self.journal.begin(self.version)
            self.journaled = {}
        self.hear()
        self.saved = copy.deepcopy([getattr(self, name) for name in self.BOOKS])
        self.saved_state, self.saved_groups = self.buffer.state(), self.buffer.held()
        self.saved_counted = self.counted

    def hear(self) -> None:
        journal = self.journal
        assert journal is not None
        self.buffer.on_scored = lambda group, started: note(journal, group, started)

    def crash(self) -> list[int]:
        """The process dies; another one goes on from the last checkpoint with the groups that finished after it, whose
        draws are returned."""
        assert self.journal is not None
        self.journal.close()
        for name, value in zip(self.BOOKS, copy.deepcopy(self.saved), strict=True):
            setattr(self, name, value)
        self.serving = self.version
        self.journal = Journal(self.directory, "", warn=print)
        groups = recover(self.journal, self.saved_state, len(self.saved_groups), draw_of, version=self.version)
        awaited = {None, IN_GENERATION, IN_REWARD, TO_RETRY}
        self.journaled = due = {i: found for i, found in self.journaled.items() if self.where.get(i) in awaited}
        assert {group.draw.index: (started, group.num_tokens) for group, started in groups} == due
        self.buffer = OversamplingBuffer(**self.options)
        self.buffer.restore(self.saved_state, self.saved_groups, groups, version=self.version)
        self.send_back(self.at(IN_GENERATION, IN_REWARD), STOPPED)
        self.where |= dict.fromkeys(range(len(self.where), max(due, default=-1) + 1), TO_RETRY)
        for index, (started, tokens) in due.items():
            self.where[index], self.since[index], self.size[index] = BUFFERED, started, tokens
        self.forget_the_unscored()
        self.finished.sort(key=lambda index: index in due)  # those of the checkpoint came first
        self.audit()
        self.hear()
        self.open()
        self.drawn_now = 0 if self.staleness else self.saved_counted + len(due)
        return sorted(due)

    def close_journal(self) -> None:
        assert self.journal is not None
        self.journal.close()
