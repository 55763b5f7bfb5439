"""The reward function `code`: solutions with known verdicts, what is a block, what is the same output."""

import asyncio
import json
import time

import psutil
import pytest

from dapo.config.reward import RewardFunctionConfig, SandboxConfig
from dapo.rewards.calling.fork_server import Item
from dapo.rewards.code import agrees, compute_score, last_block, read_tests, returned
from tests.support.rewards.reward_children import busy_processes, use
from tests.support.sandbox.problems import solutions

LIMITS = {"wall_s": 120.0, "cpu_s": 5.0, "memory_bytes": 512 << 20}


def use_code(body, count, partial):
    function = RewardFunctionConfig(path="code", kwargs={"partial": partial})
    sandbox = SandboxConfig(cpu_s=0.5, wall_s=1.0, total_s=10.0)
    return use(function, body, count=count, timeout_s=600, sandbox=sandbox, **LIMITS)


def scores(cases, partial, count):
    async def body(children):
        items = [Item(source="t", text=c.text, ground_truth=c.ground_truth, extra_info={}) for c in cases]
        verdicts = await asyncio.gather(*map(children.score, items))
        return [(case.name, verdict.score) for case, verdict in zip(cases, verdicts, strict=True)]

    return use_code(body, count, partial)


def test_solutions_are_scored_by_their_share():
    cases = solutions()
    wanted = [(case.name, case.share, case.share, "") for case in cases]
    got = [(name, score.reward, score.accuracy, score.failure) for name, score in scores(cases, True, 2)]
    assert got == wanted


@pytest.mark.nightly
def test_solutions_on_a_busy_machine_are_right_or_wrong():
    cases = solutions(1)
    wanted = [(case.name, 1.0 if case.share == 1 else -1.0, float(case.share == 1), "") for case in cases]
    with busy_processes():
        found = scores(cases, False, 4)
    got = [(name, score.reward, score.accuracy, score.failure) for name, score in found]
    assert got == wanted, [one for one, a, b in zip(found, got, wanted, strict=True) if a != b]


def test_a_sandbox_that_is_killed_costs_no_verdict():
    cases = [case for case in solutions(2) if "ever" not in case.name]

    async def body(children):
        items = [Item(source="t", text=c.text, ground_truth=c.ground_truth, extra_info={}) for c in cases]
        scoring = [asyncio.ensure_future(children.score(item)) for item in items]
        server = psutil.Process(children.about["pid"])
        for _ in range(3):
            (sandbox,) = [one for one in server.children() if "dapo.sandbox.server" in one.cmdline()]
            sandbox.kill()
            await asyncio.to_thread(until_replaced, server, sandbox.pid)
            under_way = [one for one in scoring if not one.done()][:2]
            await asyncio.wait(under_way)  # a response is tried twice: no second kill for one of these
        return [(verdict.score.reward, verdict.score.failure) for verdict in await asyncio.gather(*scoring)]

    assert use_code(body, 2, True) == [(case.share, "") for case in cases]


def until_replaced(server, pid):
    deadline = time.monotonic() + 60
    while not [one for one in server.children() if one.pid != pid and "dapo.sandbox.server" in one.cmdline()]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        pytest.param("```\nx\n```\nand\n```py\ny\n```", "y\n", id="the-last"),
        pytest.param("```python\nx\n```\n```text\n1\n```", "x\n", id="another-language"),
        pytest.param("```python\nx\n```\nIt prints:\n```\n1\n```", "x\n", id="an-output-without-a-name"),
        pytest.param("```py\nx\n```\n```\n1\n```\n```Python3\ny\n```\n```\n2", "y\n", id="the-last-with-a-name"),
        pytest.param("```\nx\n```\n```\ny\n```\n```text\n1\n```", "y\n", id="no-name-at-all"),
        pytest.param("```python\nx = '''\n  ```\n'''", "x = '''\n", id="a-fence-inside-ends-it"),
        pytest.param("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n", id="a-longer-fence"),
        pytest.param("1. So:\n   ```python\n   if x:\n     y\n   ```", "if x:\n  y\n", id="in-a-list"),
        pytest.param("```python\nx\ny", "x\ny", id="open-to-the-end"),
        pytest.param("<answer>\n```python\nx\n```</answer>", "x\n", id="a-tag-behind-it"),
        pytest.param("```python\nx\n``` It works.", "x\n", id="words-behind-it"),
        pytest.param("So:\r\n```python\r\nx\r\n```\r\nDone.", "x\r\n", id="other-ends-of-lines"),
        pytest.param("```python\nx\n\nNo:\n```python\ny\n```", "y\n", id="one-behind-an-open-one"),
        pytest.param("Code: ```python\nx\n```\nOutput:\n```\n1\n```", "x\n", id="words-before-it"),
        pytest.param("* ```py\n  if x:\n    y\n  ```", "if x:\n  y\n", id="behind-a-bullet"),
        pytest.param("```python\nx = '```python'\ny\n```", "x = '```python'\ny\n", id="one-in-its-text"),
        pytest.param("I use ```python for it:\n```python\nx\n```", "x\n", id="a-mention-before-it"),
        pytest.param("print(1)", "", id="none"),
        pytest.param("so ```x``` it is", "", id="in-a-line"),
    ],
)
def test_the_last_block(text, block):
    assert last_block(text) == block


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        pytest.param("1 2\n3\n", "1 2\n3", True, id="end-of-line"),
        pytest.param("1  2 \r\n3\n\n", "1 2\n3", True, id="white-space"),
        pytest.param("1 2 3\n", "1 2\n3", False, id="other-lines"),
        pytest.param("\n1", "1", False, id="empty-line-before"),
        pytest.param("0.3333333", "0.33333333333", True, id="rounded"),
        pytest.param("0.334", "0.33333333333", False, id="not-rounded"),
        pytest.param("0", "0.0000001", False, id="zero-for-a-small-number"),
        pytest.param("0", "1e-9", False, id="zero-for-a-smaller-one"),
        pytest.param("1e-17", "0.0", True, id="rounded-zero"),
        pytest.param("1", "1.0", True, id="whole"),
        pytest.param("1.0", "1", False, id="a-fraction-for-a-whole"),
        pytest.param("1000001", "1000000", False, id="whole-numbers-are-exact"),
        pytest.param("yes", "YES", False, id="case"),
        pytest.param("nan", "nan", True, id="words"),
        pytest.param("inf", "1e999", False, id="infinity"),
        pytest.param("1_0.5", "10.5", False, id="underscore"),
        pytest.param("\u0661.5", "1.5", False, id="other-digits"),
        pytest.param("", "", True, id="nothing"),
    ],
)
def test_the_same_output(output, expected, same):
    assert agrees(output, expected) is same


@pytest.mark.parametrize(
    ("result", "expected", "same"),
    [
        pytest.param("[1, 2]", [1, 2], True, id="list"),
        pytest.param("3", [3], True, id="listed"),
        pytest.param("[3]", 3, False, id="not-listed"),
        pytest.param("0.30000000000000004", 0.3, True, id="rounded"),
        pytest.param("0", 1e-07, False, id="zero-for-a-small-number"),
        pytest.param('{"1": 2}', {"1": 2}, True, id="object"),
        pytest.param("1", True, True, id="bool"),
        pytest.param("NaN", float("nan"), False, id="nan"),
        pytest.param("1" * 400, 1.5, False, id="huge"),
        pytest.param("9" * 5000, 1, False, id="too-many-digits"),
        pytest.param("[" * 100000, [], False, id="nested"),
        pytest.param("", None, False, id="nothing"),
        pytest.param("null", None, True, id="none"),
    ],
)
def test_the_same_result(result, expected, same):
    assert returned(result, expected) is same


@pytest.mark.parametrize(
    ("truth", "says"),
    [
        pytest.param("42", "no problem for `code`", id="a-number"),
        pytest.param("{", "no JSON", id="no-json"),
        pytest.param("[" * 100000, "no JSON", id="nested"),
        pytest.param('{"inputs": []}', "the lists `inputs` and `outputs`", id="no-outputs"),
        pytest.param('{"inputs": [], "outputs": []}', "0 inputs", id="no-tests"),
        pytest.param('{"inputs": ["1"], "outputs": []}', "1 inputs and 0 outputs", id="lengths"),
        pytest.param('{"inputs": ["x"], "outputs": [1], "fn_name": "f"}', "no JSON", id="arguments"),
    ],
)
def test_a_ground_truth_that_is_no_problem_is_refused(truth, says):
    with pytest.raises(ValueError, match=says):
        read_tests(truth)


def test_only_the_first_tests_count_where_asked():
    truth = json.dumps({"inputs": ["1", "2", "3"], "outputs": ["1", "2", "0"]})
    text = "```\nprint(input())\n```"
    assert [compute_score("", text, truth, max_tests=n)["score"] for n in (0, 2)] == [-1.0, 1.0]
    assert compute_score("", text, truth, partial=True)["passed"] == pytest.approx(2 / 3)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("head", ["", "```", "```python\n"])
def test_repeated_text_costs_bounded_work(head: str) -> None:
    """A pattern that can split the same text in several ways takes time that grows with its square."""
    slow = []
    for unit in ("`", "~", "`~", "```\n", "~~~\n", "```python\n", "``` ", "a", " ", "\t", "a`", "-"):
        began = time.process_time()
        last_block(head + unit * (64_000 // len(unit)))
        if time.process_time() - began > 1:
            slow.append(unit)
    assert slow == []
