"""Makes word problems of one step: `python -m dapo.smollm2.word_problems [--out DIR]` writes the data of
`+experiment=smollm2_cpu` in the DAPO-Math schema: `train.parquet`, 6000 prompts, and `val.parquet`, 256 held-out ones.
"""

import argparse
import hashlib
import random
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

DATA_DIR = Path(__file__).parent / "data"
DATA_SOURCE = "word_problems"
INSTRUCTION = 'Think in one short sentence, then write "Answer:" and the number.'
NAMES = ("Tom", "Mia", "Ali", "Eva", "Sam", "Lea", "Ben", "Zoe")
THINGS = ("apples", "books", "coins", "cards", "pens", "shells")
KINDS = ("gets", "gives", "boxes", "shares", "compares")

Split = Literal["train", "heldout"]
Problem = tuple[str, int, int, int]  # kind, its two numbers, the answer


def draw_problem(rng: random.Random, split: Split) -> Problem:
    """Draws a problem, each kind as often as the others. A held-out one has two numbers that no training problem of its
    kind has together, in whatever order."""
    kind = rng.choice(KINDS)
    while True:
        problem = _numbers(rng, kind)
        digest = hashlib.sha256(f"{kind} {sorted(problem[1:3])}".encode()).digest()
        if (int.from_bytes(digest[:8], "big") % 10 == 0) == (split == "heldout"):
            return problem


def _numbers(rng: random.Random, kind: str) -> Problem:
    one, other = rng.randint(2, 12), rng.randint(2, 12)
    first, second = rng.randint(3, 30), rng.randint(2, 20)
    match kind:
        case "gives":
            more, less = max(first, second) + 1, min(first, second)
            return kind, more, less, more - less
        case "boxes":
            return kind, one, other, one * other
        case "shares":
            return kind, one * other, one, other
        case _:
            return kind, first, second, first + second


def problem_text(problem: Problem, rng: random.Random) -> str:
    """Words a problem with random names and things."""
    kind, first, second, _ = problem
    one, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    return {
        "gets": f"{one} has {first} {thing} and gets {second} more. How many {thing} does {one} have now?",
        "gives": f"{one} has {first} {thing} and gives {second} of them to {other}. "
        f"How many {thing} does {one} have left?",
        "boxes": f"{one} has {first} boxes with {second} {thing} in each. How many {thing} does {one} have?",
        "shares": f"{one} shares {first} {thing} equally among {second} friends. "
        f"How many {thing} does each friend get?",
        "compares": f"{one} has {first} {thing}. {other} has {second} more {thing} than {one}. "
        f"How many {thing} does {other} have?",
    }[kind]


def rows(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns `count` problems, no two with the same text, as records of the DAPO-Math schema."""
    rng = random.Random(seed)
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw_problem(rng, split)
        found[problem_text(problem, rng)] = problem
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": f"{text} {INSTRUCTION}"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(answer), "style": "rule"},
            "extra_info": {"index": index, "split": split, "kind": kind},
        }
        for index, (text, (kind, _, _, answer)) in enumerate(found.items())
    ]


def tables() -> dict[str, list[dict[str, Any]]]:
    """Returns the rows by file name, exactly as shipped."""
    return {"train.parquet": rows("train", 6000, seed=1), "val.parquet": rows("heldout", 256, seed=2)}


def write(description: str | None, tables: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """Runs a command line: writes the tables by file name to `--out`, or to `folder` without it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=folder, help="folder to write to (default: the package's own)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        pq.write_table(pa.Table.from_pylist(table), out / name, compression="zstd")
        print(f"{out / name}: {len(table)} prompts, {(out / name).stat().st_size} bytes")


if __name__ == "__main__":
    write(__doc__, tables(), DATA_DIR)
