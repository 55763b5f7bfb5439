"""Hostile programs: none has an effect outside, none is better than wrong, and a control after each is right."""

import json
import subprocess
import sys

import psutil
import pytest

from dapo.config.sandbox import SandboxConfig
from dapo.rewards.calling.fork_server import Item
from dapo.sandbox.client import Sandbox
from dapo.sandbox.program import FILES, Program
from tests.support.rewards.reward_children import use
from tests.support.sandbox.attacks import OUTWARD, source
from tests.support.sandbox.inward import INWARD, RESULTS
from tests.support.sandbox.outside import TRUTH, Outside

LIMITS = SandboxConfig(
    cpu_s=0.2, wall_s=0.4, total_s=1.0, memory_bytes=128 << 20, output_bytes=1 << 18, files=8, threads=8
)
CONTROL = "print(int(input()) + 1)"
PROGRAMS = OUTWARD | INWARD


@pytest.fixture
def outside(tmp_path, monkeypatch):
    monkeypatch.setenv("DAPO_SECRET", TRUTH)
    made = Outside(tmp_path)
    yield made
    made.close()


def item(program, truth):
    return Item(source="test", text=f"```python\n{program}\n```", ground_truth=json.dumps(truth), extra_info={})


def items(outside):
    """Each program with its name and, after it, a control."""
    to_find = {"inputs": ["nothing\n"], "outputs": [TRUTH]}
    to_return = {"fn_name": "f", "inputs": [[]], "outputs": [TRUTH]}
    hostile = [(name, item(source(body, outside.values), to_find)) for name, body in PROGRAMS.items()]
    hostile += [(name, item(body, to_return)) for name, body in RESULTS.items()]
    for name, one in hostile:
        yield name, one
        yield f"control after {name}", item(CONTROL, {"inputs": [f"{len(name)}\n"], "outputs": [f"{len(name) + 1}\n"]})


def test_there_are_enough_of_them():
    assert len(PROGRAMS) + len(RESULTS) >= 60 and not OUTWARD.keys() & INWARD.keys()


@pytest.mark.parametrize(
    "name",
    [
        *("os.system", "kill a process", "limits and priority of others", "truncate a checkpoint", "remove and rename"),
        *("modes, owners, times", "hard links", "TCP", "UDP"),
    ],
)
def test_an_effect_is_seen(name, outside, tmp_path):
    """The same programs have it without the sandbox; else its absence below would say nothing."""
    program = source(OUTWARD[name], outside.values)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=60)
    if name == "kill a process":
        outside.victim.wait(60)
        assert outside.victim.returncode < 0
    else:
        assert outside.state() != outside.before, done


def test_a_finding_is_seen(outside, tmp_path):
    for body in (OUTWARD["read the data"], INWARD["environment"]):
        done = subprocess.run(
            [sys.executable, "-c", source(body, outside.values)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert TRUTH in done.stdout


def test_no_program_has_an_effect_or_a_better_verdict_than_wrong(outside):
    async def body(children):
        for name, one in items(outside):
            verdict = await children.score(one)
            got = (verdict.score.accuracy, verdict.score.reward, verdict.score.failure)
            assert got == ((1.0, 1.0, "") if name.startswith("control") else (0.0, -1.0, "")), (name, verdict)
            assert outside.state() == outside.before, name
        return children.respawned, children.about["programs"]

    replaced, way = use("code", body, timeout_s=300, cpu_s=2.0, wall_s=20.0, sandbox=LIMITS)
    assert replaced == 0  # no program ends or blocks the process that holds its truth
    assert "seccomp" in way


@pytest.mark.parametrize("files", FILES)
def test_no_program_finds_what_is_outside(files, outside):
    try:
        sandbox = Sandbox(LIMITS, files=[files])
    except ValueError as error:
        pytest.skip(str(error))
    with sandbox:
        server = psutil.Process(sandbox.pid)
        for name, body in PROGRAMS.items():
            outcome = sandbox.run(Program(source=source(body, outside.values), stdin="nothing\n"))
            assert TRUTH not in outcome.stdout + outcome.stderr, name
            assert outside.state() == outside.before, name
            assert len(outcome.stdout) <= LIMITS.output_bytes
            assert sandbox.run(Program(source=CONTROL, stdin="1")).stdout == "2\n", name
            assert server.children() == [], name
