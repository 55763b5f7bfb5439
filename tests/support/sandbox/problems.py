"""Programming problems in the public formats with 200 solutions whose verdicts are known, made by code.

A problem is a function of a list of numbers. Its tests begin with an even, an odd, an even and an odd number, and the
last is longer than the others, so that a solution can fail the ones it shall fail.
"""

import json
import math
import random
from dataclasses import dataclass
from typing import Any

TESTS = 4
PROBLEMS = (
    "sum(v)",
    "max(v) - min(v)",
    "sorted(v)",
    "math.gcd(*v)",
    "sum(v) / len(v)",
    "len(set(v))",
    "''.join(map(str, v))[::-1]",
    "[x * x for x in v]",
    "sum(x for x in v if x % 2)",
    "bin(sum(v))[2:]",
)
FORMATS = ("text", "text", "text", "lines", "lines", "method", "method", "json", "json", "listed")
# What `solve(v)` does before it returns the right value, what the program does at its end, and the share of tests that
# it passes then.
BEHAVIOURS = {
    "right": ("pass", "", 1.0),
    "right with noise": ("import sys; print('v', v, file=sys.stderr)", "", 1.0),
    "right in a thread": (
        "import threading; threading.stack_size(1 << 26); t = threading.Thread(target=sum, args=(v,)); t.start(); "
        "t.join()",
        "",
        1.0,
    ),
    "right after recursion": (
        "import sys; sys.setrecursionlimit(10 ** 5); f = lambda n: n and f(n - 1); f(5000)",
        "",
        1.0,
    ),
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
WRAPPED = ("two blocks, the right one last", "two blocks, the right one first")


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """Holds a response with its ground truth and the share of tests that it passes."""

    name: str
    text: str
    ground_truth: str
    share: float


def solutions(seed: int = 0) -> list[Solution]:
    """Returns 200 solutions: of each problem, one of each behaviour and of each wrapping."""
    rng = random.Random(seed)
    found = []
    for problem, kind in zip(PROBLEMS, FORMATS, strict=True):
        truth = json.dumps(ground_truth(problem, kind, rng))
        programs = {name: (program(problem, kind, *parts[:2]), parts[2]) for name, parts in BEHAVIOURS.items()}
        right, wrong = programs["right"][0], programs["no syntax"][0]
        texts = {name: (fenced(source, rng), share) for name, (source, share) in programs.items()}
        texts[WRAPPED[0]] = (f"First:\n```python\n{wrong}\n```\nBetter:\n```python\n{right}", 1.0)
        texts[WRAPPED[1]] = (f"```py\n{right}\n```\nor\n```py\n{wrong}\n```\nIt prints:\n```text\n1\n```", 0.0)
        found += [
            Solution(name=f"{problem}, {kind}, {name}", text=text, ground_truth=truth, share=share)
            for name, (text, share) in texts.items()
        ]
    return found


def ground_truth(problem: str, kind: str, rng: random.Random) -> dict[str, Any]:
    """Returns the tests in one of the public formats."""
    lists = [[2 * rng.randrange(1, 500) + test % 2, *rng.choices(range(1, 1000), k=4)] for test in range(TESTS)]
    lists[-1] += rng.choices(range(1, 1000), k=3)
    values = [REFERENCE[problem](v) for v in lists]
    inputs, outputs = [" ".join(map(str, v)) for v in lists], [shown(value) for value in values]
    if kind == "text":
        return {"inputs": [f"{line}\n" for line in inputs], "outputs": [f"{line} \n" for line in outputs]}
    if kind == "lines":
        return {"inputs": [[line] for line in inputs], "outputs": [[line] for line in outputs]}
    if kind == "json":
        return {
            "fn_name": "solve",
            "inputs": [json.dumps(v) for v in lists],
            "outputs": [json.dumps(v) for v in values],
        }
    listed = kind == "listed"
    return {"fn_name": "solve", "inputs": [[v] for v in lists], "outputs": [[v] if listed else v for v in values]}


REFERENCE = {
    "sum(v)": sum,
    "max(v) - min(v)": lambda v: max(v) - min(v),
    "sorted(v)": sorted,
    "math.gcd(*v)": lambda v: math.gcd(*v),
    "sum(v) / len(v)": lambda v: sum(v) / len(v) + 1e-9,  # as another language may round
    "len(set(v))": lambda v: len(set(v)),
    "''.join(map(str, v))[::-1]": lambda v: "".join(map(str, v))[::-1],
    "[x * x for x in v]": lambda v: [x * x for x in v],
    "sum(x for x in v if x % 2)": lambda v: sum(x for x in v if x % 2),
    "bin(sum(v))[2:]": lambda v: bin(sum(v))[2:],
}


def shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def program(problem: str, kind: str, before: str, after: str) -> str:
    """Returns the source of a solution."""
    body = f"def solve(v):\n    {before}\n    return {problem}\n"
    if kind in ("text", "lines"):
        end = "v = solve(list(map(int, input().split())))\nprint(*v if isinstance(v, list) else [v])"
        return f"import math\n{body}{end}\n{after}"
    if kind == "method":
        indented = "".join(f"    {line}\n" for line in body.replace("(v)", "(self, v)", 1).splitlines())
        return f"import math\nclass Solution:\n{indented}{after}"
    return f"import math\n{body}{after}"


def fenced(source: str, rng: random.Random) -> str:
    """Returns a response around the source."""
    language = rng.choice(["python", "Python", "py", "python3", ""])
    return f"Let us see.\n\n```{language}\n{source}\n```\n" + rng.choice(["", "It is linear.", "`solve` does it."])
