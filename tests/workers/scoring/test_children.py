"""What a reward function does to the child process that calls it, and what becomes of the response."""

import math

import pytest

from dapo.rewards.calling.sandbox import MAX_FILE_BYTES
from tests.support.rewards.reward_children import item, use
from tests.support.rewards.reward_programs import PROGRAM

LINE = PROGRAM.splitlines().index('    "raise": lambda rest: {}[rest],') + 1
RESPONSES = [
    pytest.param("7", 1.0, "", "", id="right"),
    pytest.param("8", 0.0, "", "", id="wrong"),
    pytest.param("hang", math.nan, "wall", "reward.limits.wall_s", id="hangs"),
    pytest.param("spin", 0.0, "cpu", "reward.limits.cpu_s", id="spins"),
    pytest.param("power", 0.0, "cpu", "reward.limits.cpu_s", id="spins-in-c"),
    pytest.param("leak", 0.0, "memory", "reward.limits.memory_bytes", id="leaks-without-end"),
    pytest.param("keep 4096", 0.0, "memory", "reward.limits.memory_bytes", id="takes-four-gib"),
    pytest.param("segfault", math.nan, "crash", "exit status -11", id="segfaults"),
    pytest.param("exit", math.nan, "crash", "exit status 0", id="ends-its-process"),
    pytest.param("sysexit", math.nan, "error", "SystemExit", id="asks-to-exit"),
    pytest.param("raise x", math.nan, "error", f"'x' on data source 'test', at line {LINE} of mine.py", id="raises"),
    pytest.param("none", math.nan, "", "", id="cannot-tell"),
    pytest.param("nan", math.nan, "", "", id="nan"),
    pytest.param("text", math.nan, "error", "gave str as its score", id="gives-text"),
    pytest.param("nokeys", math.nan, "error", "without `score`", id="gives-other-keys"),
    pytest.param("talk", math.nan, "crash", "", id="writes-into-the-socket"),
    pytest.param("print", 1.0, "", "", id="prints"),
    pytest.param("warn", 1.0, "", "", id="warns"),
    pytest.param("thread", 1.0, "", "", id="starts-a-thread"),
    pytest.param("\ud800\x00", 0.0, "", "", id="text-that-utf-8-cannot-hold"),
]


@pytest.fixture(scope="module")
def scored(program):
    """Each response with its verdict and that of a right one after it, all through the same children."""

    async def body(children):
        texts = [case.values[0] for case in RESPONSES]
        return {text: (await children.score(item(text)), await children.score(item("7"))) for text in texts}

    return use(program, body, timeout_s=240, cpu_s=0.3)  # a tenth of the wall-clock limit, for machines that are busy


@pytest.mark.parametrize(("text", "accuracy", "failure", "told"), RESPONSES)
def test_what_becomes_of_a_response(scored, text, accuracy, failure, told):
    verdict, next_one = scored[text]
    assert verdict.score.failure == failure
    assert told in verdict.detail and "SECRET" not in verdict.detail
    assert [verdict.score.accuracy] == pytest.approx([accuracy], nan_ok=True)
    assert math.isnan(verdict.score.reward) == math.isnan(accuracy)
    assert next_one.score.accuracy == 1.0, "the child, or its successor, goes on"


def test_on_a_busy_machine_what_computes_is_wrong_and_what_waits_is_not(program):
    """Its CPU limit would take longer than the wall-clock limit."""

    async def body(children):
        return [await children.score(item(text)) for text in ("spin", "hang", "7")]

    verdicts = use(program, body, cpu_s=2.1, wall_s=2.0)
    assert [verdict.score.failure for verdict in verdicts] == ["cpu", "wall", ""]


def test_network_and_processes_are_denied_with_a_remedy_or_allowed(program):
    """The kernel of a machine without seccomp lets a process give up nothing, and the start-up line says so."""

    async def body(children):
        return children.granted, [await children.score(item(action)) for action in ("socket", "fork", "run")]

    granted, verdicts = use(program, body)
    assert set(granted) in ({"processes", "network"}, set()), "one filter for both"
    for verdict in verdicts:
        if granted:
            assert verdict.score.failure == "error" and "`reward.limits.allow_" in verdict.detail
        else:
            assert verdict.score.failure == "" or "as its score" in verdict.detail, "it did what it was told to"

    async def both(children):
        return children.granted, [await children.score(item(action)) for action in ("socket", "run")]

    granted, verdicts = use(program, both, allow_network=True, allow_processes=True)
    assert granted == []
    assert all("as its score" in verdict.detail for verdict in verdicts), "both did what they were told"


@pytest.mark.parametrize(("network", "secrets"), [(False, 0), (True, 3)])
def test_children_come_from_a_clean_process_without_secrets(program, monkeypatch, capfd, network, secrets):
    """One that may ask a server may need its key; none needs Ray's token."""
    monkeypatch.setenv("JUDGE_API_KEY", "s3cr3t")
    monkeypatch.setenv("MYKEY", "s3cr3t of another name")
    monkeypatch.setenv("DATABASE_URL", "postgres://me:s3cr3t@host/a")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s3cr3t too")

    async def body(children):
        return [(await children.score(item(text))).score.metrics for text in ("told", "modules", "warn")]

    told, modules, _ = use(program, body, allow_network=network)
    assert [*told.values()] == [secrets] and modules == {"compute_score/heavy": 0.0}
    assert capfd.readouterr().err == "", "a warning does not quote a response into the log"


def test_files_are_bounded(program, tmp_path):
    async def body(children):
        return await children.score(item(f"write {tmp_path / 'big'}"))

    assert "File too large" in use(program, body).detail
    assert (tmp_path / "big").stat().st_size <= MAX_FILE_BYTES
