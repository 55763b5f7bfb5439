"""Measures the sample store: responses and tokens of a step in, seconds per step and memory out.

Synthetic responses with texts of four bytes per token. The caller waits for none of the writing; the table says how
long the thread takes until a step is on disk, and how much memory that needs beyond the responses themselves.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from dapo.bench.driver import make_group, peak_bytes
from dapo.config.schema import LoggingConfig
from dapo.report.console import warn
from dapo.report.table import table
from dapo.sampling.draws import TRAINED
from dapo.sampling.outcome import MIXED
from dapo.store.samples import SampleStore
from dapo.store.schema import DATABASE
from dapo.types import Collected

N = 16  # responses of a group


def a_step(first: int, groups: int, tokens: int) -> Collected:
    """Returns a step that trains on all its groups. first: number of its first draw."""
    rng = np.random.default_rng(first)
    made = tuple(make_group(first + number, rng, N, tokens) for number in range(groups))
    return Collected(
        drawn=made,
        groups=made,
        fates=(TRAINED,) * groups,
        outcomes=(MIXED,) * groups,
        returned=(),
        why_returned="",
        unfinished=frozenset(),
    )


def run(given: argparse.Namespace) -> None:
    """Prints a table with a row per step."""
    groups = max(1, given.responses // N)
    rows = []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        store = SampleStore(Path(folder), LoggingConfig(), warn=warn)
        store.begin({})
        for number in range(given.steps):
            collected = a_step(number * groups, groups, given.tokens)
            held, cpu = peak_bytes(), time.process_time()
            began = time.monotonic()
            store.step(number + 1, collected)
            caller_s = time.monotonic() - began
            store.flush()
            written_s = time.monotonic() - began
            grown, cpu = peak_bytes() - held, time.process_time() - cpu
            size = sum(path.stat().st_size for path in Path(folder).glob(f"{DATABASE}*"))
            figures = (1000 * caller_s, written_s, cpu, grown / 2**20, size / 2**20)
            rows.append([str(number + 1), *[f"{figure:.3f}" for figure in figures]])
            del collected
        store.close()
    print(f"{groups * N} responses of {given.tokens} tokens a step, under {given.folder}")
    names = ("step", "caller ms", "on disk after s", "CPU s", "growth of peak memory MiB", "files MiB")
    print(table(names, rows))
