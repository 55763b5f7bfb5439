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
from dapo.rewards.calling.calls import Pace, Retry, Unanswered, answer
from dapo.rewards.calling.fork_server import Item
from workers.scoring.callers import MAX_FAILED_STARTS
from workers.scoring.children import Children
from workers.scoring.verdict import CanaryError, Verdict

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


@pytest.mark.parametrize(
    "error", ["Retry('busy')", "ConnectionResetError()", "TimeoutError()", "OSError('gone')"], ids=lambda text: text[:6]
)
def test_what_passes_is_retried(tmp_path: Path, error: str) -> None:
    body = (
        "calls[solution_str] = calls.get(solution_str, 0) + 1\n"
        f"if calls[solution_str] < 3:\n    raise {error}\nreturn float(calls[solution_str])"
    )
    found = score(tmp_path, body, ["a", "b"])
    assert [(one.score.reward, one.score.metrics["compute_score/retries"]) for one in found] == [(3.0, 2.0)] * 2


def test_what_does_not_pass_is_no_zero(tmp_path: Path) -> None:
    found = score(tmp_path, "raise Retry('busy')", ["a"])
    assert (found[0].score.failure, math.isnan(found[0].score.reward)) == ("remote", True)
    assert found[0].detail == "reward function `compute_score`: 4 calls were not answered; the last: Retry: busy"


@pytest.mark.parametrize(
    ("errors", "away"),
    [
        pytest.param([ConnectionRefusedError()], True, id="refused"),
        pytest.param([OSError(errno.EHOSTUNREACH, "no route")], True, id="no-route"),
        pytest.param([socket.gaierror("unknown name")], True, id="no-name"),
        pytest.param([httpx.ConnectTimeout("the node is off")], True, id="no-answer-to-a-connection"),
        pytest.param([Retry("loads its model", away=True)], True, id="as-the-function-says"),
        pytest.param([Retry("busy", after_s=0.001)], True, id="asks-to-be-left-alone"),
        pytest.param([Retry("no score", after_s=0.001, alike=True)], False, id="has-answered"),
        pytest.param([ConnectionResetError(), ConnectionRefusedError()], True, id="gone-meanwhile"),
        pytest.param([ConnectionRefusedError(), ConnectionResetError()], False, id="back-and-cut-off"),
        pytest.param([ConnectionRefusedError(), Retry("busy")], False, id="back-and-busy"),
        pytest.param([ConnectionRefusedError(), None], False, id="back-and-silent"),
    ],
)
def test_a_server_that_is_away_at_the_last_call_is_told_from_one_that_fails(
    errors: list[Exception | None], away: bool
) -> None:
    left = iter(errors)

    async def call() -> None:
        if error := next(left):
            raise error
        await asyncio.sleep(60)

    remote = RemoteConfig(timeout_s=5.0, call_timeout_s=0.1, retries=len(errors) - 1, backoff_s=0.001)
    with pytest.raises(Unanswered) as found:
        asyncio.run(answer(call, remote, Pace(0)))
    assert found.value.away == away


def test_a_defect_is_reported_at_once(tmp_path: Path) -> None:
    found = score(tmp_path, "calls['n'] = calls.get('n', 0) + 1\nraise KeyError(calls['n'])", ["a"])
    assert (found[0].score.failure, math.isnan(found[0].score.reward)) == ("error", True)
    assert "KeyError: 1 on data source 's', at line 6 of mine.py" in found[0].detail


def test_a_function_that_wants_to_end_the_process_is_a_defect(tmp_path: Path) -> None:
    bad, good = score(tmp_path, "if solution_str == 'bad':\n    raise SystemExit(3)\nreturn 1.0", ["bad", "good"])
    assert (bad.score.failure, good.score.reward) == ("error", 1.0)
    assert "raised SystemExit: 3 on data source 's', at line 6 of mine.py" in bad.detail


@pytest.mark.parametrize("error", ["Retry", "KeyError"])
def test_an_error_tells_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """A client quotes the header that it cannot send: a key with a line break behind it, for example."""
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-of-mine\n")
    [found] = score(tmp_path, f"raise {error}('illegal header ' + repr(os.environ['MY_API_KEY']))", ["a"])
    assert math.isnan(found.score.reward) and "illegal header" in found.detail
    assert "s3cr3t" not in found.detail


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{'score': 1.0, (1, 2): 3.0}", "TypeError: keys must be"),
        ("{'score': 10 ** 5000}", "ValueError: Exceeds the limit"),
        ("{'score': 1.0, 'pred': 'x' * (1 << 21)}", "1,048,576 are the most"),
    ],
    ids=["key", "digits", "size"],
)
def test_what_cannot_be_sent_is_a_defect_and_not_waited_for(tmp_path: Path, given: str, says: str) -> None:
    bad, good = score(tmp_path, f"return {given} if solution_str == 'bad' else 1.0", ["bad", "good"])
    assert (bad.score.failure, math.isnan(bad.score.reward)) == ("error", True) and says in bad.detail
    assert good.score.reward == 1.0


def test_a_task_that_calls_share_and_one_of_them_cancels_is_awaited_again(tmp_path: Path) -> None:
    """A login, say: the first call's deadline ends it for all."""
    body = (
        "if calls.get('login') is None or calls['login'].cancelled():\n"
        "    calls['times'] = calls.get('times', 0) + 1\n"
        "    calls['login'] = asyncio.ensure_future(asyncio.sleep(60 if calls['times'] == 1 else 0))\n"
        "    calls['late'] = solution_str\n"
        "await calls['login']\nreturn 1.0"
    )
    remote = RemoteConfig(timeout_s=20.0, call_timeout_s=0.3, retries=5, backoff_s=0.01)
    found = score(tmp_path, body, ["a", "b", "c"], remote)
    assert [one.score.reward for one in found] == [1.0] * 3, found


def test_a_call_without_an_answer_is_cut_off_and_tried_again(tmp_path: Path) -> None:
    body = "calls['n'] = calls.get('n', 0) + 1\nif calls['n'] == 1:\n    await asyncio.sleep(60)\nreturn 1.0"
    found = score(tmp_path, body, ["a"], RemoteConfig(timeout_s=5.0, call_timeout_s=0.2, retries=1, backoff_s=0.01))
    assert (found[0].score.reward, found[0].score.metrics["compute_score/retries"]) == (1.0, 1.0)


def test_a_call_that_swallows_its_cancellation_is_not_waited_for(tmp_path: Path) -> None:
    """It would keep its slot, and its group from being whole, until all of the worker is taken for lost."""
    body = (
        "while solution_str == 'bad':\n    try:\n        await asyncio.sleep(60)\n"
        "    except asyncio.CancelledError:\n        pass\nreturn 1.0"
    )
    quick = RemoteConfig(timeout_s=5.0, call_timeout_s=0.2, retries=1, backoff_s=0.01)
    bad, good = score(tmp_path, body, ["bad", "good"], quick, concurrency=1)
    assert (bad.score.failure, good.score.reward) == ("remote", 1.0)
    assert bad.detail.endswith("2 calls were not answered; the last: no answer within 0.2 s")


def test_a_server_that_asks_for_a_long_pause_ends_the_waiting(tmp_path: Path) -> None:
    """A limit of calls strikes all responses at once, and is none of their faults: the pool waits for the server."""
    found = score(tmp_path, "raise Retry('busy', after_s=3600)", ["a"])
    assert found[0].score.failure == "away" and "1 calls were not answered" in found[0].detail
    assert found[0].after_s == 3600


@pytest.mark.parametrize(
    ("line", "failure"), [("os._exit(3)", "crash"), ("time.sleep(600)", "wall")], ids=["ends", "blocks"]
)
def test_a_process_that_ends_or_hangs_is_replaced(tmp_path: Path, line: str, failure: str) -> None:
    body = f"if solution_str == 'bad':\n    {line}\nawait asyncio.sleep(0.1)\nreturn 1.0"
    first, second = score(tmp_path, body, ["bad", "good"], concurrency=1)
    assert (first.score.failure, math.isnan(first.score.reward)) == (failure, True)
    assert second.score.reward == 1.0


def test_a_process_that_cannot_start_again_as_it_was_breaks_the_worker(tmp_path: Path) -> None:
    """Responses that are unscorable one by one would hide it, and functions that changed would give other rewards."""
    file = tmp_path / "mine.py"
    file.write_text(HEAD + SIGNATURE + "    return 1.0\n")
    item = Item(source="s", text="x", ground_truth="7", extra_info={})

    async def lose(children: Children) -> None:
        assert children._callers is not None and children._callers._server is not None
        os.kill(children._callers._server.about["pid"], signal.SIGKILL)
        while children._callers._child is not None:
            await asyncio.sleep(0.01)

    async def run() -> None:
        async with Children([RewardFunctionConfig(path=str(file))], LimitsConfig(), 1, QUICK, 4) as children:
            file.write_text("import no_such_module")
            await lose(children)
            for _ in range(MAX_FAILED_STARTS - 2):  # its end was one
                assert (await children.score(item)).score.failure == "crash"
            with pytest.raises(CanaryError, match="did not start 4 times in a row.*no_such_module"):
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


def test_metrics_and_accuracy_of_a_plain_function_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + SIGNATURE + "    return 0.25\n")

    async def run() -> Verdict:
        functions = [RewardFunctionConfig(path="math"), RewardFunctionConfig(path=str(file), weight=2.0)]
        async with Children(functions, LimitsConfig(), 1, QUICK, 4) as children:
            assert children.about["without_canary"] == ["compute_score"]
            return await children.score(Item(source="s", text="Answer: 7", ground_truth="7", extra_info={}))

    found = asyncio.run(run()).score
    assert (found.accuracy, found.reward, found.parts) == (1.0, 1.5, {"math": 1.0, "compute_score": 0.25})
