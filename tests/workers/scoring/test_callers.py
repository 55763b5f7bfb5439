"""A person's async functions: called many at a time, retried, timed out, and replaced when their process ends."""

import asyncio
import errno
import math
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from dapo.config.reward import LimitsConfig, RemoteConfig, RewardFunctionConfig
from dapo.rewards.calling import process
from dapo.rewards.calling.calls import Pace, Retry, Unanswered, answer
from dapo.rewards.calling.fork_server import Item
from dapo.rewards.calling.process import MAX_FAILED_STARTS
from dapo.workers.scoring.children import Children
from dapo.workers.scoring.verdict import CanaryError, ChildrenLost, Verdict

HEAD = "import asyncio, os, time\nfrom dapo.rewards.calling.calls import Retry\ncalls = {}\n"
SIGNATURE = "async def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
QUICK = RemoteConfig(timeout_s=5.0, call_timeout_s=1.0, retries=3, backoff_s=0.01)


def score(folder: Path, body: str, texts: list[str], remote: RemoteConfig = QUICK, **options: Any) -> list[Verdict]:
    file = folder / "mine.py"
    file.write_text(HEAD + SIGNATURE + "".join(f"    {line}\n" for line in body.splitlines()))
    items = [Item(source="s", text=text, ground_truth="7", extra_info={}) for text in texts]

    async def run() -> list[Verdict]:
        limits = LimitsConfig(cpu_s=1.0, wall_s=3.0)
        functions = [RewardFunctionConfig(path=str(file))]
        async with Children(functions, limits, 1, remote, **{"concurrency": 16, **options}) as children:
            async with asyncio.timeout(60):
                found = list(await asyncio.gather(*[children.score(item) for item in items]))
            assert len(children.pids) >= 2
            return found

    return asyncio.run(run())


def test_calls_wait_together(tmp_path: Path) -> None:
    body = (
        "calls['open'] = calls.get('open', 0) + 1\nmost = calls['most'] = max(calls.get('most', 0), calls['open'])\n"
        "while calls['most'] < 8:\n    await asyncio.sleep(0.01)\n"
        "calls['open'] -= 1\nreturn {'score': 1.0, 'acc': True, 'most': calls['most']}"
    )
    found = score(tmp_path, body, ["x"] * 8)
    assert [(one.score.reward, one.score.accuracy, one.score.metrics["compute_score/most"]) for one in found] == [
        (1.0, 1.0, 8.0)
    ] * 8


def test_what_passes_is_retried_and_is_no_zero_where_it_does_not(tmp_path: Path) -> None:
    errors = ["Retry('busy')", "ConnectionResetError()", "TimeoutError()", "OSError('gone')"]
    body = (
        "calls[solution_str] = calls.get(solution_str, 0) + 1\n"
        "if solution_str == 'never' or calls[solution_str] < 3:\n"
        "    raise Retry('no') if solution_str == 'never' else eval(solution_str)\n"
        "return float(calls[solution_str])"
    )
    *found, never = score(tmp_path, body, [*errors, "never"])
    assert [(one.score.reward, one.score.metrics["compute_score/retries"]) for one in found] == [(3.0, 2.0)] * 4
    assert (never.score.failure, math.isnan(never.score.reward)) == ("remote", True)
    assert never.detail == "reward function `compute_score`: 4 calls were not answered; the last: Retry: no"


AWAY = {
    "refused": ([ConnectionRefusedError()], True),
    "no-route": ([OSError(errno.EHOSTUNREACH, "no route")], True),
    "no-name": ([socket.gaierror("unknown name")], True),
    "no-answer-to-a-connection": ([httpx.ConnectTimeout("the node is off")], True),
    "as-the-function-says": ([Retry("loads its model", away=True)], True),
    "asks-to-be-left-alone": ([Retry("busy", after_s=0.001)], True),
    "has-answered": ([Retry("no score", after_s=0.001, alike=True)], False),
    "gone-meanwhile": ([ConnectionResetError(), ConnectionRefusedError()], True),
    "back-and-cut-off": ([ConnectionRefusedError(), ConnectionResetError()], False),
    "back-and-busy": ([ConnectionRefusedError(), Retry("busy")], False),
    "back-and-silent": ([ConnectionRefusedError(), None], False),
}


@pytest.mark.parametrize(("errors", "away"), AWAY.values(), ids=AWAY)
def test_a_server_that_is_away_at_the_last_call(errors: list[Exception | None], away: bool) -> None:
    left = iter(errors)

    async def call() -> None:
        if error := next(left):
            raise error
        await asyncio.sleep(60)

    remote = RemoteConfig(timeout_s=5.0, call_timeout_s=0.1, retries=len(errors) - 1, backoff_s=0.001)
    with pytest.raises(Unanswered) as found:
        asyncio.run(answer(call, remote, Pace(0)))
    assert found.value.away == away


DEFECTS = {
    "raise KeyError(calls['n'])": "KeyError: 1 on data source 's', at line 6 of mine.py",  # at once
    "raise SystemExit(3)": "raised SystemExit: 3 on data source 's', at line 6 of mine.py",
    "return {'score': 1.0, (1, 2): 3.0}": "TypeError: keys must be",
    "return {'score': 10 ** 5000}": "ValueError: Exceeds the limit",
    "return {'score': 1.0, 'pred': 'x' * (1 << 21)}": "1,048,576 are the most",
}


@pytest.mark.parametrize("line", DEFECTS, ids=["raises", "exits", "key", "digits", "size"])
def test_a_defect_is_reported_at_once_and_costs_others_nothing(tmp_path: Path, line: str) -> None:
    body = f"calls['n'] = calls.get('n', 0) + (solution_str == 'bad')\nif solution_str == 'bad': {line}\nreturn 1.0"
    bad, good = score(tmp_path, body, ["bad", "good"])
    assert (bad.score.failure, math.isnan(bad.score.reward), good.score.reward) == ("error", True, 1.0)
    assert DEFECTS[line] in bad.detail


@pytest.mark.parametrize("error", ["Retry", "KeyError"])
def test_an_error_tells_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """A client quotes the header that it cannot send: a key with a line break behind it, for example."""
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-of-mine\n")
    [found] = score(tmp_path, f"raise {error}('illegal header ' + repr(os.environ['MY_API_KEY']))", ["a"])
    assert math.isnan(found.score.reward) and "illegal header" in found.detail
    assert "s3cr3t" not in found.detail


def test_a_call_without_an_answer_is_cut_off_and_tried_again(tmp_path: Path) -> None:
    """Also one that swallows its cancellation: it would keep its slot until the worker is taken for lost."""
    body = (
        "calls[solution_str] = calls.get(solution_str, 0) + 1\n"
        "if solution_str == 'late' and calls['late'] == 1:\n    await asyncio.sleep(60)\n"
        "while solution_str == 'bad':\n    try:\n        await asyncio.sleep(60)\n"
        "    except asyncio.CancelledError:\n        pass\nreturn 1.0"
    )
    quick = RemoteConfig(timeout_s=5.0, call_timeout_s=0.2, retries=1, backoff_s=0.01)
    bad, late, good = score(tmp_path, body, ["bad", "late", "good"], quick, concurrency=1)
    assert (bad.score.failure, late.score.reward, good.score.reward) == ("remote", 1.0, 1.0)
    assert late.score.metrics["compute_score/retries"] == 1.0
    assert bad.detail.endswith("2 calls were not answered; the last: no answer within 0.2 s")


@pytest.mark.parametrize(
    ("line", "failure"), [("os._exit(3)", "crash"), ("time.sleep(600)", "wall")], ids=["ends", "blocks"]
)
def test_a_process_that_ends_or_hangs_is_replaced(tmp_path: Path, line: str, failure: str) -> None:
    body = f"if solution_str == 'bad':\n    {line}\nawait asyncio.sleep(0.1)\nreturn 1.0"
    first, second = score(tmp_path, body, ["bad", "good"], concurrency=1)
    assert (first.score.failure, math.isnan(first.score.reward)) == (failure, True)
    assert second.score.reward == 1.0


def test_a_process_that_cannot_start_again_as_it_was_breaks_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that changed would give other rewards; one failure for each response would hide the cause."""
    monkeypatch.setattr(process, "PAUSE_S", 0.0)
    file = tmp_path / "mine.py"
    file.write_text(HEAD + SIGNATURE + "    return 1.0\n")
    item = Item(source="s", text="x", ground_truth="7", extra_info={})

    async def run() -> None:
        async with Children([RewardFunctionConfig(path=str(file))], LimitsConfig(), 1, QUICK, 4) as children:
            callers = children._callers
            assert callers is not None and callers._server is not None
            file.write_text("import no_such_module")
            os.kill(callers._server.about["pid"], signal.SIGKILL)
            while callers._child is not None:
                await asyncio.sleep(0.01)
            for _ in range(MAX_FAILED_STARTS - 2):  # its end was one
                assert (await children.score(item)).score.failure == "crash"
            with pytest.raises(ChildrenLost, match=f"did not start {MAX_FAILED_STARTS} times in a row.*no_such_module"):
                await children.score(item)
            file.write_text(HEAD + SIGNATURE + "    return 0.0\n")
            with pytest.raises(CanaryError, match="have changed during the run"):
                await children.score(item)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_calls_are_spaced(tmp_path: Path) -> None:
    body = (
        "now = time.monotonic()\ngap = now - calls.get('last', -9.0)\ncalls['last'] = now\n"
        "return {'score': 1.0, 'gap': gap}"
    )
    remote = RemoteConfig(timeout_s=0.05, call_timeout_s=1.0, retries=0, backoff_s=0.01, calls_per_minute=240.0)
    found = score(tmp_path, body, ["x"] * 4, remote)
    gaps = sorted(one.score.metrics["compute_score/gap"] for one in found)
    # 0.25 s apart; on a busy machine one begins late, and the next in time.
    assert min(gaps) >= 0.1 and [one.score.reward for one in found] == [1.0] * 4
