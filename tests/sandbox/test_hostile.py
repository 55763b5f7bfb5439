"""The hostile programs of `attacks.txt`: none has an effect outside, none is better than wrong, and a control after
each is right.

Each goes on where a step is refused, so that a later one still gets its chance, and writes what it found: the expected
output is a word that it could only have found there. `$name` stands for what the test has made outside of the sandbox.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from string import Template

import psutil
import pytest

from dapo.config.reward import SandboxConfig
from dapo.rewards.calling.fork_server import Item
from dapo.sandbox.client import Sandbox
from dapo.sandbox.program import FILES, Program
from tests.support.rewards.reward_children import use
from tests.support.sandbox.outside import TRUTH, Outside

LIMITS = SandboxConfig(
    cpu_s=0.2, wall_s=0.4, total_s=1.0, memory_bytes=128 << 20, output_bytes=1 << 18, files=8, threads=8
)
CONTROL = "print(int(input()) + 1)"
SECTION = re.compile(r"^=== (?:(\w+): )?(.*)\n((?:(?!===).*\n)*)", re.MULTILINE)
ATTACKS = [found.groups() for found in SECTION.finditer(Path(__file__).with_name("attacks.txt").read_text())]
HEAD = ATTACKS.pop(0)[2]


def attacks(*groups):
    """Programs by their names: outward ones, and those that aim at limits, at the truth, or at the verdict."""
    return {name: body if group == "result" else HEAD + body for group, name, body in ATTACKS if group in groups}


def source(body, outside):
    return Template(body).substitute(outside.values)


@pytest.fixture
def outside(tmp_path, monkeypatch):
    monkeypatch.setenv("DAPO_SECRET", TRUTH)
    made = Outside(tmp_path)
    yield made
    made.close()


def item(program, truth):
    return Item(source="test", text=f"```python\n{program}\n```", ground_truth=json.dumps(truth), extra_info={})


def bare(program, folder):
    """Runs a program without the sandbox."""
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "name",
    [
        *("os.system", "kill a process", "limits and priority of others", "truncate a checkpoint", "remove and rename"),
        *("modes, owners, times", "hard links", "TCP", "UDP"),
    ],
)
def test_an_effect_is_seen(name, outside, tmp_path):
    """The same programs have it without the sandbox; else its absence below would say nothing."""
    done = bare(source(attacks("outward")[name], outside), tmp_path)
    if name == "kill a process":
        outside.victim.wait(60)
        assert outside.victim.returncode < 0
    else:
        assert outside.state() != outside.before, done


def test_a_finding_is_seen(outside, tmp_path):
    for body in (attacks("outward")["read the data"], attacks("truth")["environment"]):
        assert TRUTH in bare(source(body, outside), tmp_path).stdout


def test_no_program_has_a_better_verdict_than_wrong(outside):
    to_find = {"inputs": ["nothing\n"], "outputs": [TRUTH]}
    to_return = {"fn_name": "f", "inputs": [[]], "outputs": [TRUTH]}
    hostile = attacks("exhaustion", "truth", "verdict")
    items = [(name, item(source(body, outside), to_find)) for name, body in hostile.items()]
    items += [(name, item(body, to_return)) for name, body in attacks("result").items()]
    assert len(items) > 40
    control = item(CONTROL, {"inputs": ["41\n"], "outputs": ["42\n"]})

    async def body(children):
        server = psutil.Process(children.about["pid"])
        (sandbox,) = [one for one in server.children() if "dapo.sandbox.server" in one.cmdline()]
        for name, one in items:
            verdict = await children.score(one)
            assert (verdict.score.accuracy, verdict.score.reward, verdict.score.failure) == (0.0, -1.0, ""), name
            assert outside.state() == outside.before and sandbox.children() == [], name
            after = await children.score(control)
            assert (after.score.accuracy, after.score.reward, after.score.failure) == (1.0, 1.0, ""), name
        return children.respawned, children.about["programs"]

    replaced, way = use("code", body, timeout_s=300, cpu_s=2.0, wall_s=20.0, sandbox=LIMITS)
    assert replaced == 0  # no program ends or blocks the process that holds its truth
    assert "seccomp" in way


@pytest.mark.parametrize("files", FILES)
def test_no_program_finds_or_changes_what_is_outside(files, outside):
    try:
        sandbox = Sandbox(LIMITS, files=[files])
    except ValueError as error:
        pytest.skip(str(error))
    with sandbox:
        server = psutil.Process(sandbox.pid)
        for name, body in attacks("outward", "truth").items():
            outcome = sandbox.run(Program(source=source(body, outside), stdin="nothing\n"))
            assert TRUTH not in outcome.stdout + outcome.stderr, name
            assert outside.state() == outside.before, name
            assert len(outcome.stdout) <= LIMITS.output_bytes
            assert sandbox.run(Program(source=CONTROL, stdin="1")).stdout == "2\n", name
            assert server.children() == [], name
