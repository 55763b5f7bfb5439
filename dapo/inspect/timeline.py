"""Shows what every role did within one step, and what the driver waited for.

In: the spans of a step (`dapo.store`). Out: a row per role, the same for the terminal and for the page.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dapo.report.console import plain

ALONE = "driver"  # no phase is open
KINDS = {  # of a stretch: a letter, and in words
    "requests": ("#", "requests in the engine"),
    "unscored": ("#", "responses without a verdict"),
    "generation": ("g", "generation"),
    "reward": ("r", "scoring"),
    "update": ("u", "update"),
    "reference": ("k", "reference policy"),
    "sync": ("w", "weight sync"),
    "save": ("s", "checkpoint"),
    "evaluation": ("e", "evaluation"),
    "sleep": ("z", "engines fall asleep"),
    ALONE: ("d", "driver alone"),
}
# Of several, the first counts.
WAITS = ("update", "sync", "save", "evaluation", "reference", "sleep", "generation", "reward")
RANKS = ("update", "reference", "sync", "save")
MOST_ENGINES = 8  # rows; of more, the sum, the one with the most and the one with the least to do
LETTERS = ", ".join(f"{letter} {words}" for letter, words in KINDS.values() if letter != "#")
SHADES = "·▁▂▃▄▅▆▇█"

Span = Mapping[str, Any]
Part = tuple[float, float, str, float]  # began, ended, kind, level


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """Holds a row of a timeline. parts: in their order; none overlaps another. peak: the greatest level."""

    role: str
    parts: tuple[Part, ...]

    @property
    def peak(self) -> float:
        """Returns the greatest level; 1 where none is."""
        return max((level for *_, level in self.parts), default=1.0)

    def about(self, began: float, ended: float) -> str:
        """Returns the row in words. began, ended: of the timeline."""
        sums: dict[str, float] = {}
        for start, end, kind, level in self.parts:
            sums[kind] = sums.get(kind, 0.0) + (end - start) * level
        if "requests" in sums or "unscored" in sums:
            [(kind, area)] = sums.items()
            return f"{area / max(ended - began, 1e-9):.3g} {KINDS[kind][1]}, at most {self.peak:.3g}"
        most = sorted(sums, key=lambda kind: -sums[kind])
        return ", ".join(f"{KINDS[kind][1]} {sums[kind]:.3g} s" for kind in most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Holds a step from `began`, below 0 where something lay between it and the step before, to `ended`, in seconds."""

    step: int
    began: float
    ended: float
    lanes: tuple[Lane, ...]


def timeline(step: int, spans: Sequence[Span], seconds: float | None) -> Timeline | None:
    """Returns the timeline of a step; None without spans. seconds: of the whole step; None: not known."""
    if not spans:
        return None
    by_lane: dict[str, list[Span]] = {}
    for span in spans:
        by_lane.setdefault(span["lane"], []).append(span)
    began = min(0.0, *(span["began"] for span in spans))
    ended = max(seconds or 0.0, *(span["ended"] for span in spans))
    scored = [_part(span, "unscored") for span in by_lane.get("reward workers", ())]
    lanes = [
        *_engines({name: found for name, found in by_lane.items() if name.startswith("engine ")}),
        Lane(role="reward workers", parts=tuple(scored)),
        Lane(role="ranks", parts=_first_of(by_lane, RANKS)),
        Lane(role="evaluation", parts=tuple(_part(span, "evaluation") for span in by_lane.get("aside", ()))),
        Lane(role="driver waits for", parts=_first_of(by_lane, WAITS, (began, ended))),
    ]
    return Timeline(step=step, began=began, ended=ended, lanes=tuple(lane for lane in lanes if lane.parts))


def _part(span: Span, kind: str) -> Part:
    return span["began"], span["ended"], kind, span["level"]


def _engines(by_lane: Mapping[str, Sequence[Span]]) -> list[Lane]:
    names = sorted(by_lane, key=lambda name: (len(name), name))
    lanes = [Lane(role=plain(name), parts=tuple(_part(span, "requests") for span in by_lane[name])) for name in names]
    if len(lanes) <= MOST_ENGINES:
        return lanes
    sums: dict[tuple[float, float], float] = {}
    for began, ended, _, level in (part for lane in lanes for part in lane.parts):
        sums[began, ended] = sums.get((began, ended), 0.0) + level  # all engines are told in the same stretches
    total = Lane(role=f"{len(lanes)} engines", parts=tuple((*at, "requests", sums[at]) for at in sorted(sums)))
    lanes.sort(key=lambda lane: sum((end - start) * level for start, end, _, level in lane.parts))
    return [total, lanes[-1], lanes[0]]


def _first_of(
    by_lane: Mapping[str, Sequence[Span]], phases: Iterable[str], whole: tuple[float, float] | None = None
) -> tuple[Part, ...]:
    """Returns stretches of the first phase that is open in each. whole: the rest of it is the driver alone."""
    spans = [(span["began"], span["ended"], phase) for phase in phases for span in by_lane.get(phase, ())]
    edges = sorted({edge for began, ended, _ in spans for edge in (began, ended)} | set(whole or ()))
    found: list[Part] = []
    for began, ended in pairwise(edges):
        kind = next((phase for start, end, phase in spans if start <= began and ended <= end), ALONE if whole else "")
        if found and found[-1][1:3] == (began, kind):
            found[-1] = (found[-1][0], ended, kind, 1.0)
        elif kind:
            found.append((began, ended, kind, 1.0))
    return tuple(found)


def drawn(lane: Lane, began: float, ended: float, width: int) -> str:
    """Returns a row of `width` characters: of each stretch of the time, the letter of the kind that takes most of it;
    of levels, a block as high as the level is."""
    size = max(ended - began, 1e-9) / width
    cells: list[dict[str, float]] = [{} for _ in range(width)]
    for start, end, kind, level in lane.parts:
        for place in range(max(0, int((start - began) / size)), min(width, int((end - began) / size) + 1)):
            left = began + place * size
            part = max(0.0, min(end, left + size) - max(start, left)) / size
            cells[place][kind] = cells[place].get(kind, 0.0) + part * level
    return "".join(_character(cell, lane.peak) for cell in cells)


def _character(cell: Mapping[str, float], peak: float) -> str:
    kind = max(cell, key=lambda name: cell[name], default="")
    if not kind or not cell[kind]:
        return SHADES[0]
    letter = KINDS[kind][0]
    return letter if letter != "#" else SHADES[max(1, round(cell[kind] / peak * (len(SHADES) - 1)))]


def shown(found: Timeline) -> dict[str, Any]:
    """Returns what the page draws: times in seconds, levels as shares of the row's peak."""
    kinds = list(KINDS)
    return {
        "step": found.step,
        "began": _short(found.began),
        "ended": _short(found.ended),
        "lanes": [
            {
                "role": lane.role,
                "about": lane.about(found.began, found.ended),
                "parts": [
                    [_short(began), _short(ended), kinds.index(kind), round(level / lane.peak, 2)]
                    for began, ended, kind, level in lane.parts
                ],
            }
            for lane in found.lanes
        ],
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")
