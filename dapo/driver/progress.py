"""Shows what a run is doing between two step lines, so that a step of an hour does not look like a hang.

    Session (clock, buffer, traffic, evaluation) ─▶ Moment ─▶ one line ─▶ on a terminal in place, every second;
                                                                         elsewhere a line every `logging.watchdog_s`

Before and after the sessions a terminal shows what is waited for (`dapo.ground.watchdog`).
It reads the driver's own state in the watchdog's thread, and makes no remote call. Long waits are reported by the
watchdog.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dapo.config.schema import Config
from dapo.ground import console
from dapo.ground.table import duration, short
from dapo.ground.watchdog import Watchdog, awaited, waiting
from dapo.report.log import SEPARATOR

if TYPE_CHECKING:
    from rich.console import Console

    from dapo.driver.session import Session

GENERATING, SCORING = "generating", "scoring"
PHASES = {  # of the clock; if several are open, the first is shown
    "update": "updating",
    "sync": "syncing weights",
    "sleep": "putting the engines to sleep",
    "evaluation": "evaluating",
    "reference": "asking the reference policy",
    "save": "saving",
}
Show = Callable[[str], None]
STEPS = 5  # the last ones, whose mean is what a step is expected to take


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What a run is doing now. Made by `moment_of`, consumed by `Progress`. step: in progress, from 1 to total_steps.
    phase: in words; phase_s: its duration so far. usable, wanted, dropped: groups, see `OversamplingBuffer.progress`.
    running, ended, longest_s: see `Traffic`; per_s: tokens per second of the engines. evaluation: policy version under
    evaluation, finished answers, and all answers."""

    step: int
    total_steps: int
    phase: str
    phase_s: float
    usable: int
    wanted: int
    dropped: int
    running: int
    ended: int
    per_s: float
    longest_s: float
    evaluation: tuple[int, int, int] | None


def moment_of(session: "Session", total_steps: int, now: float) -> Moment:
    """Returns what `session` is doing. now: `time.monotonic()`. May be called in another thread than the session's."""
    buffer, traffic, since = session.stream.buffer, session.stream.traffic, dict(session.clock.since)
    phase, began = next(((words, since[name]) for name, words in PHASES.items() if name in since), ("", 0.0))
    if not phase and buffer.collecting:
        phase, began = (GENERATING if traffic.running else SCORING), traffic.began
    usable, wanted, dropped = buffer.progress()
    return Moment(
        step=min(buffer.version + 1, total_steps),
        total_steps=total_steps,
        phase=phase or "preparing",
        phase_s=now - began if phase else 0.0,
        usable=usable,
        wanted=wanted,
        dropped=dropped,
        running=traffic.running,
        ended=traffic.ended,
        per_s=traffic.tokens_per_s(),
        longest_s=traffic.longest_s(now),
        evaluation=session.evaluations.progress(),
    )


def line_of(moment: Moment, left: str = "") -> str:
    """Returns the progress line, most important part first. left: remaining time of the step, in words."""
    parts = [f"in step {moment.step}/{moment.total_steps}", moment.phase]  # not matched by a grep for step lines
    if moment.phase_s >= 1:
        parts[-1] += f" for {duration(moment.phase_s)}"
    if left:
        parts.append(left)
    if moment.phase in (GENERATING, SCORING) or moment.running:
        parts.append(f"groups {moment.usable}/{moment.wanted} usable, {moment.dropped} to be dropped")
        parts.append(f"responses {moment.ended} done, {moment.running} running")
        if moment.per_s:
            parts.append(f"{short(moment.per_s)} tokens/s")
        if moment.running:
            parts.append(f"longest {duration(moment.longest_s)}")
    if moment.evaluation is not None:
        version, came, total = moment.evaluation
        parts.append(f"eval of step {version} {came}/{total} answers")
    return SEPARATOR.join(parts)


@contextmanager
def live_line(terminal: "Console | None" = None) -> Iterator[Callable[[str], None] | None]:
    """Keeps one line at the bottom of a terminal, below everything that is printed, and erases it at the end. Yields a
    function that replaces the line, callable from any thread; None without a terminal. terminal: for tests; None: the
    one that standard output and standard error both must be."""
    terminal = terminal or _terminal()
    if terminal is None or not terminal.is_terminal or terminal.is_dumb_terminal:
        yield None
        return
    from rich.live import Live
    from rich.text import Text

    with Live(console=terminal, transient=True, auto_refresh=False) as live:
        # Truncated to the terminal's current width at each refresh: a line that wraps could not be erased.
        yield lambda line: live.update(Text(line, no_wrap=True), refresh=True)


def _terminal() -> "Console | None":
    """Returns the terminal if both streams are one, else None: the order of lines would be lost."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    return terminal_console()


def terminal_console(**options: Any) -> "Console":
    """Returns a rich console that prints lines unchanged: no markup, wrapping or colours; it never hides the cursor, so
    that a killed process leaves the terminal usable."""
    from rich.console import Console

    class _Plain(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False

    return _Plain(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)


@contextmanager
def starting(cfg: Config, what: str) -> Iterator[None]:
    """Shows on a terminal that the block waits for `what`, as `waiting` does."""
    progress = Progress(cfg.trainer.total_steps, cfg.logging.watchdog_s)
    with waiting(what), progress, Watchdog(cfg.logging.watchdog_s, before=progress.look):
        yield


class Progress:
    """Context manager that shows the progress of one run; the watchdog calls `look` repeatedly."""

    def __init__(
        self,
        total_steps: int,
        every_s: float,
        *,
        say: Show = console.say,
        live: Callable[[], AbstractContextManager[Show | None]] = live_line,
    ) -> None:
        """every_s: seconds between two lines without a terminal."""
        self._total_steps = total_steps
        self._every_s = every_s
        self._say = say
        self._live = live
        self._stack = ExitStack()
        self._show: Show | None = None
        self._session: Session | None = None
        self._between = "starting"
        self._step = 0  # none yet
        self._began = self._told = 0.0  # the step under way; its last line
        self._took: deque[float] = deque(maxlen=STEPS)  # seconds of whole steps

    def __enter__(self) -> "Progress":
        self._show = self._stack.enter_context(self._live())
        self.look(time.monotonic())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session = self._show = None
        with suppress(OSError):  # the terminal is closed
            self._stack.close()

    def of(self, session: "Session") -> "Session":
        """Shows the progress of this session from now on, and returns it."""
        self._step, self._session = 0, session
        return session

    def over(self) -> None:
        """The last session has ended; its workers end next."""
        self._session, self._between = None, "ending"

    def look(self, now: float) -> None:
        """Updates the line on a terminal; elsewhere prints a line if it is due. now: `time.monotonic()`."""
        session, show = self._session, self._show
        if session is None:
            if show is not None:
                with suppress(RuntimeError, OSError):
                    first, *others = awaited(now) or [self._between]
                    show(
                        SEPARATOR.join([first.removeprefix("still "), *(line.partition(" for ")[2] for line in others)])
                    )
            return
        # RuntimeError: a dict changed while it was read, and the next call reads it again. OSError: the terminal is
        # closed.
        with suppress(RuntimeError, OSError):
            moment = moment_of(session, self._total_steps, now)
            if moment.step != self._step:
                self._turn(moment.step, now)
            if show is not None:
                show(line_of(moment, self._left(moment, now)))
                console.seen()
            elif now - min(self._told, console.printed_at()) >= self._every_s:
                self._told = now
                self._say(line_of(moment, self._left(moment, now)))

    def _turn(self, step: int, now: float) -> None:
        if step == self._step + 1 and self._step:
            self._took.append(now - self._began)
        self._step, self._began, self._told = step, now, now

    def _left(self, moment: Moment, now: float) -> str:
        """Estimates the remaining time of the step from the last ones. Without any, or if this step takes longer: the
        remaining time of the batch, at the rate of usable groups so far."""
        if self._took and (left := sum(self._took) / len(self._took) - (now - self._began)) > 0:
            return f"~{duration(left)} left"
        if moment.phase == GENERATING and 0 < moment.usable < moment.wanted:
            return f"batch in ~{duration(moment.phase_s * (moment.wanted / moment.usable - 1))}"
        return ""
