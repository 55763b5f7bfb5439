"""Programming problems in the public formats, with solutions whose verdicts are known.

A problem is a function of a list of numbers. Its tests begin with an even, an odd, an even and an odd number, and the
last is longer than the others, so that a solution can fail the ones it shall fail.
"""

import json
import math
import random
from typing import Any, NamedTuple

PROBLEMS = (  # and their formats
    ("sum(v)", "text"),
    ("max(v) - min(v)", "text"),
    ("sorted(v)", "text"),
    ("math.gcd(*v)", "lines"),
    ("sum(v) / len(v)", "lines"),
    ("len(set(v))", "method"),
    ("''.join(map(str, v))[::-1]", "method"),
    ("[x * x for x in v]", "json"),
    ("sum(x for x in v if x % 2)", "json"),
    ("bin(sum(v))[2:]", "listed"),
)
THREAD = "import threading as t\n    t.stack_size(1 << 26)\n    one = t.Thread(target=sum, args=(v,))\n    one.start()"
RECURSION = "import sys; sys.setrecursionlimit(10 ** 5); f = lambda n: n and f(n - 1); f(5000)"
# What `solve(v)` does before it returns the right value, what the program does at its end, and the share of tests that
# it passes then.
BEHAVIOURS = {
    "right": ("pass", "", 1.0),
    "right with noise": ("import sys; print('v', v, file=sys.stderr)", "", 1.0),
    "right in a thread": (THREAD, "", 1.0),
    "right after recursion": (RECURSION, "", 1.0),
    "right with a file": ("open('scratch', 'w').write('x'); assert open('scratch').read() == 'x'", "", 1.0),
    "right with modules": ("import decimal, numpy; numpy.sort(v); decimal.Decimal(1) / 3", "", 1.0),
    "right with names": ("List[int]; defaultdict(list); heapq.heapify(list(v)); deque(v)", "", 1.0),
    "nothing for odd": ("if v[0] % 2: return None", "", 0.5),
    "another for odd": ("if v[0] % 2: return 'another'", "", 0.5),
    "raises for odd": ("if v[0] % 2: raise ValueError(v)", "", 0.5),
    "exits for odd": ("if v[0] % 2: raise SystemExit(3)", "", 0.5),
    "leaves for odd": ("if v[0] % 2: import os; os._exit(0)", "", 0.5),
    "crashes for odd": ("if v[0] % 2: import ctypes; ctypes.string_at(0)", "", 0.5),
    "fills memory for odd": ("if v[0] % 2: bytearray(1 << 40)", "", 0.5),
    "computes for ever at last": ("if len(v) > 5:\n        while True: pass", "", 0.75),
    "sleeps for ever at first": ("import time; time.sleep(1000)", "", 0.0),
    "no syntax": ("return return", "", 0.0),
    "fails at the end": ("pass", "raise SystemExit(1)", 0.0),
}
WRAPPED = {  # by where the right program stands
    "the last block is right": ("First:\n```python\n{wrong}\n```\nBetter:\n```python\n{right}", 1.0),
    "the last block is wrong": (*("```py\n{right}\n```\nor\n```py\n{wrong}\n```\nIt prints:\n```text\n1\n```", 0.0),),
}


class Solution(NamedTuple):
    """A response with its ground truth and the share of tests that it passes."""

    name: str
    text: str
    ground_truth: str
    share: float


def solutions(seed: int = 0) -> list[Solution]:
    """Three of each behaviour and of each wrapping, with problems of different formats."""
    rng = random.Random(seed)
    found = []
    for number, name in enumerate((*BEHAVIOURS, *WRAPPED)):
        for turn in range(3):
            problem, kind = PROBLEMS[(3 * number + 4 * turn) % len(PROBLEMS)]
            right, wrong = (program(problem, kind, *BEHAVIOURS[one][:2]) for one in ("right", "no syntax"))
            if name in WRAPPED:
                text, share = WRAPPED[name][0].format(right=right, wrong=wrong), WRAPPED[name][1]
            else:
                before, after, share = BEHAVIOURS[name]
                text = fenced(program(problem, kind, before, after), rng)
            truth = json.dumps(ground_truth(problem, kind, rng))
            found.append(Solution(f"{problem}, {kind}, {name}", text, truth, share))
    return found


def ground_truth(problem: str, kind: str, rng: random.Random) -> dict[str, Any]:
    """The tests in one of the public formats."""
    lists = [[2 * rng.randrange(1, 500) + test % 2, *rng.choices(range(1, 1000), k=4)] for test in range(4)]
    lists[-1] += rng.choices(range(1, 1000), k=3)
    values = [eval(problem, {"math": math, "v": v}) for v in lists]
    if "/" in problem:
        values = [value + 1e-9 for value in values]  # as another language may round
    inputs = [" ".join(map(str, v)) for v in lists]
    outputs = [" ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values]
    if kind == "text":
        return {"inputs": [f"{line}\n" for line in inputs], "outputs": [f"{line} \n" for line in outputs]}
    if kind == "lines":
        return {"inputs": [[line] for line in inputs], "outputs": [[line] for line in outputs]}
    if kind == "json":
        return {"fn_name": "solve", "inputs": list(map(json.dumps, lists)), "outputs": list(map(json.dumps, values))}
    listed = kind == "listed"
    return {"fn_name": "solve", "inputs": [[v] for v in lists], "outputs": [[v] if listed else v for v in values]}


def program(problem: str, kind: str, before: str, after: str) -> str:
    body = f"def solve(v):\n    {before}\n    return {problem}\n"
    if kind in ("text", "lines"):
        end = "v = solve(list(map(int, input().split())))\nprint(*v if isinstance(v, list) else [v])"
        return f"import math\n{body}{end}\n{after}"
    if kind == "method":
        indented = "".join(f"    {line}\n" for line in body.replace("(v)", "(self, v)", 1).splitlines())
        return f"import math\nclass Solution:\n{indented}{after}"
    return f"import math\n{body}{after}"


def fenced(source: str, rng: random.Random) -> str:
    language = rng.choice(["python", "Python", "py", "python3", ""])
    return f"Let us see.\n\n```{language}\n{source}\n```\n" + rng.choice(["", "It is linear.", "`solve` does it."])
