"""The hostile responses of `hostile.tsv` through the child processes, a control after each.

A payload that gets executed makes a folder or file, by absolute path or in the working directory.
"""

import asyncio
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import pytest

from dapo.config.reward import LimitsConfig, RewardFunctionConfig
from dapo.rewards.calling import fork_server
from dapo.workers.scoring.children import Children
from dapo.workers.scoring.verdict import Verdict
from tests.support.rewards.reward_children import busy_processes
from tests.support.rewards.tables import meant, rows

ROWS = rows(Path(__file__).with_name("hostile.tsv"))
TEXTS = {"look-alike label", "several labels", "control and special tokens", "prompt echo", "empty", "NUL"}
TEXTS |= {"megabyte", "ReDoS bait", "invalid surrogates"}  # whole responses; the others are answers
FORMS = (
    "We go step by step.\nAnswer: {}",
    "So it is $\\boxed{{}}$",
    "Answer: ${}$",
    "**Answer:** {}",
    "Done.\nAnswer: \\boxed{{}}.",
    "It follows that \\boxed{{}}<|im_end|>",
    "Answer:\n\\[\n{}\n\\]",
    "answer : {}\n",
)
WRAPPERS = ("{}", "\\text{{}}", "${}$", "\\operatorname{{}}", "\\mathrm{{}}", "({})")  # of an injection
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    ok = False\n"
CARELESS = """
    import os, pickle, yaml
    from contextlib import suppress
    answer = solution_str.split('Answer:')[-1].strip(' .$')
    with suppress(Exception): ok |= str(eval(answer)) == ground_truth
    with suppress(Exception): pickle.loads((answer + '.').encode())
    with suppress(Exception): yaml.unsafe_load(answer)
    os.system('echo ' + answer)
    return 1.0 if ok else -1.0
"""
# As the README of math-verify has it: no filter, and all of the response.
UNFILTERED = """
    gold = parse(f'${ground_truth}$', parsing_timeout=None)
    try:
        ok = verify(gold, parse(solution_str[-1000:], parsing_timeout=None), timeout_seconds=None)
    except Exception:
        ok = False
    return 1.0 if ok else -1.0
"""
WARM_UP = "from math_verify import parse, verify\nparse('$x^2$', parsing_timeout=None)\n"
MEMORY_BYTES = LimitsConfig().memory_bytes
SLACK_BYTES = 16 << 20  # between the clean process, as seen here, and a child at the moment of its limit
AT_LIMIT = ("cpu", "memory")


@dataclass(frozen=True, slots=True)
class Item:
    """kind: of `hostile.tsv`, or "right" and "wrong" for controls."""

    kind: str
    text: str
    truth: str


@dataclass(frozen=True, slots=True)
class Run:
    """peaks: of each child, the largest address space and its limit; base: that of the fork server; in bytes."""

    verdicts: list[Verdict]
    respawned: int
    peaks: dict[int, tuple[int, int]]
    base: int

    def count(self, *failures: str) -> int:
        return sum(verdict.score.failure in failures for verdict in self.verdicts)

    def rewards(self) -> list[tuple[float, float]]:
        return [(verdict.score.accuracy, verdict.score.reward) for verdict in self.verdicts]


def corpus(trace: Path, turns: int = 1, kinds: Sequence[str] = ()) -> list[Item]:
    """Each hostile row in `turns` of the forms, and after each a control: right and wrong ones in turn."""
    right, wrong = (cycle([row for row in ROWS if row[0] == kind]) for kind in ("right", "wrong"))
    hostile = [row for row in ROWS if row[0] not in ("right", "wrong") and (not kinds or row[0] in kinds)]
    items = []
    for index, (kind, text, truth) in enumerate(hostile * turns):
        form, forms = index + index // len(hostile), FORMS
        if "injection" in kind or kind.startswith("pickle"):
            name = f"{kind.split()[0]}-{index}"
            text = text.replace("⟪trace⟫", name if index % 3 == 0 else f"{trace}/{name}")
            text = WRAPPERS[form // 2 % len(WRAPPERS)].replace("{}", text, 1)
            forms = (*FORMS, "{}")  # bare: a pickle begins with the first character
        if kind not in TEXTS:
            text = forms[form % len(forms)].replace("{}", text, 1)
        items.append(Item(kind, meant(text), meant(truth)))
        kind, text, truth = next(wrong if index % 2 else right)
        filler = "The next step follows from the last one. " * (7 * index % 60)
        items.append(Item(kind, f"{filler}\n{meant(text)}", meant(truth)))
    return items


def run(path: str, items: Sequence[Item], count: int, limits: LimitsConfig | None = None) -> Run:
    """Scores the items with the reward function `path` in `count` children."""

    async def whole() -> Run:
        peaks: dict[int, tuple[int, int]] = {}
        async with Children([RewardFunctionConfig(path=path)], limits or LimitsConfig(), count) as children:
            base = status(children.about["pid"], "VmSize")
            watcher = asyncio.create_task(watch(children, peaks))
            try:
                verdicts = await asyncio.gather(*(children.score(sent(item)) for item in items))
            finally:
                watcher.cancel()
            look(children, peaks)
            return Run(verdicts, children.respawned, peaks, base)

    return asyncio.run(whole())


def sent(item: Item) -> fork_server.Item:
    extra_info = {"num_response_tokens": len(item.text) // 4}
    return fork_server.Item(source="hostile", text=item.text, ground_truth=item.truth, extra_info=extra_info)


async def watch(children: Children, peaks: dict[int, tuple[int, int]]) -> None:
    while True:
        look(children, peaks)
        await asyncio.sleep(0.02)


def look(children: Children, peaks: dict[int, tuple[int, int]]) -> None:
    """Notes the peak of every living child, which the kernel keeps, and its limit."""
    for pid in children.pids:
        with suppress(OSError, StopIteration):  # it may end meanwhile
            lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
            limit = next(line.split()[3] for line in lines if line.startswith("Max address space"))
            peaks[pid] = (status(pid, "VmPeak"), sys.maxsize if limit == "unlimited" else int(limit))


def status(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def broken_rules(items: Sequence[Item], done: Run, wall_s: float = LimitsConfig().wall_s) -> list[str]:
    """One line per item or process that broke a rule. wall_s: that the run had as its limit."""
    lines = [
        f"{item.kind}: {rule} · {ascii(item.text[-120:])} · truth {item.truth!r}"
        for item, verdict in zip(items, done.verdicts, strict=True)
        for rule in broken(item, verdict, wall_s)
    ]
    if not done.peaks:
        lines.append("nobody saw the memory of a child")
    for pid, (peak, limit) in done.peaks.items():
        if peak > limit or limit > done.base + MEMORY_BYTES + SLACK_BYTES:
            lines.append(f"child {pid} reached {peak} bytes, limit {limit}, base {done.base}")
    if done.respawned > 2 * done.count(*AT_LIMIT):  # a second time in a fresh process, where memory was short
        lines.append(f"{done.respawned} children were replaced for {done.count(*AT_LIMIT)} verdicts at a limit")
    return lines


def broken(item: Item, verdict: Verdict, wall_s: float) -> list[str]:
    score = verdict.score
    found = []
    if (score.accuracy, score.reward) != ((1.0, 1.0) if item.kind == "right" else (0.0, -1.0)):
        found.append(f"accuracy {score.accuracy}, reward {score.reward}, prediction {score.prediction!a}")
    if score.failure and (item.kind in ("right", "wrong") or score.failure not in AT_LIMIT):
        found.append(f"failure {score.failure!r} ({verdict.detail})")
    if math.isnan(verdict.cpu_s) and score.failure != "memory" or verdict.cpu_s > 2.5 or verdict.wall_s > wall_s + 0.5:
        found.append(f"{verdict.cpu_s:.2f} s CPU, {verdict.wall_s:.2f} s")
    return found


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which everything runs, and in which executed payloads show."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_what_a_careless_verifier_executes_is_seen(trace: Path, tmp_path: Path) -> None:
    """Else the absence of traces below would say nothing."""
    file = tmp_path / "careless.py"
    file.write_text(HEAD + CARELESS)
    kinds = ("Python injection", "shell injection", "pickle and forged verdict")
    items = corpus(trace, len(FORMS), kinds)
    done = run(str(file), items, 2, LimitsConfig(allow_processes=True))
    assert any("Python injection: accuracy 1.0" in line for line in broken_rules(items, done))
    made = Counter(name.split("-")[0] for name in os.listdir(trace))
    assert made["Python"] >= 12 and made["shell"] >= 5 and made["pickle"] >= 4, made


@pytest.mark.parametrize("function", ["math", "math_verify"])
@pytest.mark.parametrize(
    "turns", [1, pytest.param(len(FORMS), marks=[pytest.mark.long, pytest.mark.timeout(3600)])], ids=["once", "all"]
)
def test_hostile_responses_are_wrong_and_harm_nothing(function: str, turns: int, trace: Path) -> None:
    items = corpus(trace, turns)
    # Among busy processes, and beside another long test, 2 s of CPU take more than 10 s.
    limits = LimitsConfig(wall_s=60.0) if turns > 1 else LimitsConfig()
    with busy_processes() if turns > 1 else ExitStack():
        done = run(function, items, 4, limits)
    assert broken_rules(items, done, limits.wall_s) == []
    assert done.count("cpu") <= len(items) // 30
    assert os.listdir(trace) == []


def test_what_a_careless_verifier_does_ends_at_its_limits(trace: Path, tmp_path: Path) -> None:
    """The controls in between never notice."""
    file = tmp_path / "careless.py"
    file.write_text(WARM_UP + HEAD + UNFILTERED)
    items = corpus(trace, kinds=("power tower", "matrix"))
    limits = LimitsConfig(cpu_s=0.5)
    done = run(str(file), items, 2, limits)
    assert done.count("", *AT_LIMIT) == len(items)
    assert done.count("cpu") >= 3
    assert max(verdict.cpu_s for verdict in done.verdicts if not math.isnan(verdict.cpu_s)) < limits.cpu_s + 0.5
    assert done.count(*AT_LIMIT) <= done.respawned <= 2 * done.count(*AT_LIMIT)
    assert done.rewards()[1::2] == run(str(file), items[1::2], 1, limits).rewards()
