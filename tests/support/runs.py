"""Small runs of the tiny experiment: as a program, and in the test's own process on engines that outlive a run."""

import asyncio
import hashlib
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, closing
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from dapo.algorithm.fate import TRAINED
from dapo.config.compose import compose
from dapo.config.derived import device_of, lent_engines
from dapo.config.paths import resolve_path
from dapo.config.schema import Config
from dapo.report.store.schema import DATABASE
from dapo.sampling.draws import DROPPED
from dapo.state.run_dir import claim_output_dir
from tests.support.report.reference import undocumented

STOP_S = 120  # a deadline against hanging, wide because test machines are shared; a quiet one needs less than 10 s
START_S = 600  # 30 s on a quiet machine; a slow one must not fail for that
TINY = "dapo_tiny"

# Two epochs of two shuffled mini-batches, a schedule per optimizer step, a reference policy: what could make a resumed
# run another one than the whole run.
OBJECTIVE = (
    *("actor.ppo_epochs=2", "actor.optim.lr_scheduler=inverse_sqrt", "actor.optim.lr_scheduler_unit=optimizer_step"),
    *("algorithm.kl.reward_coeff=0.01", "algorithm.entropy_coeff=0.001", "algorithm.rollout_correction.mode=truncate"),
)
SMALL = (
    *("data.train_batch_size=4", "actor.ppo_mini_batch_size=2", "rollout.n=4", "eval.n=1", "eval.every=2"),
    *("actor.max_tokens_per_gpu=256", "checkpoint.every=2"),
    *OBJECTIVE,
)


def command(output_dir: Path, val_file: str, *overrides: str) -> list[str]:
    return [
        *(sys.executable, "-u", "-m", "dapo.main_ppo", f"+experiment={TINY}", f"trainer.output_dir={output_dir}"),
        *(*SMALL, f"data.val_files=[{val_file}]", *overrides),
    ]


def run_program(output_dir: Path, val_file: str, *overrides: str) -> str:
    """What the program printed."""
    done = subprocess.run(command(output_dir, val_file, *overrides), capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@asynccontextmanager
async def build_rollouts(cfg: Config) -> AsyncIterator[Any]:
    """Starts the engines alone, for several runs one after the other (`train(cfg, rollouts)`); stopped at the end.
    On a CPU: one placement group per run hands GPUs to engines and actors together."""
    from dapo.driver.fleet import STOP_GRACE_S, create_rollouts
    from dapo.workers.engines.arguments import engine_args
    from dapo.workers.placement import Placement

    assert device_of(cfg) == "cpu"
    engines = create_rollouts(cfg, Placement(cfg, "cpu"))
    try:
        await engines.start(resolve_path(cfg.model.path), engine_args(cfg, "cpu"))
        yield engines
    finally:
        await engines.stop(STOP_GRACE_S)


def engine_needs(cfg: Config) -> dict[str, Any]:
    """Returns what `build_rollouts` starts engines with, by name: runs that share engines must agree on it. vLLM's seed
    is not among it: every response is a request with a seed of its own."""
    from dapo.workers.engines.arguments import engine_args

    keys = ("num_engines", "cpu_threads", "start_timeout_s", "timeout_s")
    rollout = {f"rollout.{key}": value for key, value in asdict(cfg.rollout).items() if key in keys}
    arguments = {f"engine argument {name}": value for name, value in engine_args(cfg, "cpu").items() if name != "seed"}
    lent = {"engines on the actors' GPUs": lent_engines(cfg)}
    return {"model.path": resolve_path(cfg.model.path), **rollout, **lent, **arguments}


def _heed_ctrl_c() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C, and so would every process below these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_program(line: list[str], until: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A running program that has printed a line with this beginning, and all processes below it."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        line, stdout=pipe, stderr=pipe, text=True, start_new_session=True, preexec_fn=_heed_ctrl_c
    )
    deadline = time.monotonic() + START_S
    assert process.stdout is not None
    try:
        for printed in process.stdout:
            if printed.startswith(until):
                return process, psutil.Process(process.pid).children(recursive=True)
            assert time.monotonic() < deadline, "no such line in time"
    except BaseException:
        process.terminate()  # it ends what it has started
        process.communicate(timeout=STOP_S)
        raise
    raise AssertionError(process.communicate()[1])


def finish(process: subprocess.Popen[str], children: list[psutil.Process]) -> tuple[int, str]:
    """Exit code and messages of a program that was told to stop; it and everything below it must be gone in time."""
    began = time.monotonic()
    try:
        _, err = process.communicate(timeout=STOP_S)
    finally:
        process.kill()
    print(f"ended after {time.monotonic() - began:.1f} s")
    _, left = psutil.wait_procs(children, timeout=STOP_S)
    assert not left, f"left behind: {[child.cmdline()[:3] for child in left]}"
    assert len(err.strip().splitlines()) <= 3 and "Traceback" not in err, err
    return process.returncode, err


class Runs:
    """Runs in this process. Ray and the engines are up already; everything else is the run's own."""

    def __init__(self) -> None:
        self._loop = asyncio.Runner()  # engines live in one event loop
        self._stop = AsyncExitStack()
        self._engines: Any = None
        self._needs: dict[str, Any] = {}  # what they were started with

    def small(self, output_dir: Path, *overrides: str, beside: Callable[[Any], bool] | None = None) -> Path:
        """The run that the program makes of `command`, without evaluation."""
        cfg = compose([*SMALL, f"trainer.output_dir={output_dir}", "data.val_files=[]", *overrides], TINY)
        return self.train(cfg, beside)

    def train(self, cfg: Config, beside: Callable[[Any], bool] | None = None, until: int | None = None) -> Path:
        """Returns the directory of the run. Raises what the program ends with as a message.

        beside: called with the engines again and again, until it returns True; the run must not end before.
        """
        from dapo.driver.run import train

        async def whole() -> None:
            await self.engines(cfg)
            with claim_output_dir(cfg.trainer.output_dir, cfg.checkpoint.resume, asdict(cfg)) as run_dir:
                other = asyncio.create_task(_repeat(beside, self._engines))
                try:
                    await train(cfg, run_dir, run_dir.store, self._engines, until=until)
                    assert other.done(), "the run ended before what was to happen beside it"
                    other.result()
                finally:
                    other.cancel()

        self._loop.run(whole())
        return Path(cfg.trainer.output_dir)

    async def engines(self, cfg: Config) -> Any:
        """Those that a run of `cfg` needs; for what `run` runs."""
        if (needs := engine_needs(cfg)) != self._needs:  # one set at a time: each takes a gigabyte
            await self._stop.aclose()
            lasting = deepcopy(cfg)
            lasting.rollout.max_restarts = 100  # tests kill engines, and those of a process share their hour
            self._engines, self._needs = await self._stop.enter_async_context(build_rollouts(lasting)), needs
        return self._engines

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        """What `asyncio.run` does, in the event loop of the engines."""
        return self._loop.run(what)

    def rest(self) -> None:
        """Ends the engines; a run that needs some starts others."""
        self._needs = {}
        self._loop.run(self._stop.aclose())

    def close(self) -> None:
        self.rest()
        self._loop.close()


async def _repeat(what: Callable[[Any], bool] | None, engines: Any) -> None:
    while what is not None and not await asyncio.to_thread(what, engines):
        await asyncio.sleep(0.1)


def checkpoint(output_dir: Path) -> Path:
    """The newest one."""
    return output_dir / "checkpoints" / (output_dir / "checkpoints" / "LATEST").read_text().strip()


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on timing; no name may be missing in the reference of metrics."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    assert undocumented(name for line in lines for name in line) == [], "add it to dapo/report/README.md"
    return [{key: value for key, value in line.items() if not key.startswith(("perf/", "ledger/"))} for line in lines]


def samples(output_dir: Path) -> str:
    """A digest of the groups and answers in the sample store, which must be whole and hold what the ledger counts;
    without what depends on timing."""
    ledger = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in ledger if "ledger/drawn" in line][-1]
    with closing(sqlite3.connect(output_dir / DATABASE)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        fates = dict(connection.execute("SELECT fate, count(*) FROM groups GROUP BY fate"))
        assert fates == {fate: count for fate in (TRAINED, *DROPPED) if (count := last[f"ledger/draws_{fate}"])}
        counts = "SELECT (SELECT count(*) FROM responses), (SELECT sum(responses) FROM groups)"
        [(answers, expected)] = connection.execute(counts)
        assert answers == expected > 0
        groups = connection.execute("SELECT * FROM groups ORDER BY draw").fetchall()
        columns = "draw, sample, tokens, finish_reason, policy_versions, accuracy, reward, parts, prediction, text"
        responses = connection.execute(f"SELECT {columns} FROM responses ORDER BY draw, sample").fetchall()
    return hashlib.sha256(repr((groups, responses)).encode()).hexdigest()
