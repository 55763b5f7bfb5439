"""Engines outside of the Ray cluster of a run (`dapo serve`): they change neither tokens nor weights."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dapo.config.paths import resolve_path
from tests.end_to_end.faults.test_scale import Program
from tests.support.engines.certificates import write_certificate, write_token
from tests.support.link import SlowLink
from tests.support.outcomes import assert_all_draws_are_accounted_for, outcome
from tests.support.runs import START_S, command, run_program

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

STEPS = 60
PORT, STORE_PORT = 7443, 7444
HOST, GUEST, SPACE = "10.45.0.1", "10.45.0.2", "dapo-outside"
RUN = (f"trainer.total_steps={STEPS}", "eval.every=0", "checkpoint.every=20", "weight_sync.bucket_bytes=500000")
# An engine joins only if it fetches a version before the next update begins: generation takes longer than updates here.
SLOWER = (
    *("data.train_batch_size=32", "actor.ppo_mini_batch_size=16", "rollout.n=16", "weight_sync.bucket_bytes=200000"),
    *("actor.ppo_epochs=1", "actor.max_tokens_per_gpu=2048"),
)
LAGS = ("filter_groups.max_staleness=1", "algorithm.rollout_correction.mode=truncate")


class Outside:
    """What a run and its engines outside need: files, command lines, programs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.store = folder, folder / "store"
        self._certificate, key = write_certificate(folder, "driver", "127.0.0.1", HOST)
        self._token = write_token(folder)
        val = folder / "val.parquet"
        pq.write_table(pq.read_table(resolve_path("pkg://dapo.tiny/data/val.parquet")).slice(0, 8), val)
        self.val = str(val)
        self.keys = (
            *(f"rollout.outside.listen=127.0.0.1:{PORT}", f"rollout.outside.certificate_file={self._certificate}"),
            *(f"rollout.outside.key_file={key}", f"rollout.outside.token_file={self._token}"),
            f"weight_sync.store={self.store}",
        )
        self.programs: list[Program] = []

    def run(self, *overrides: str) -> Program:
        line = command(self._folder / "run", self.val, *RUN, *self.keys, *overrides)
        return self._start(line)

    def engine(self, address: str = "127.0.0.1", store: str = "", within: tuple[str, ...] = ()) -> Program:
        files = ("--token", self._token, "--ca", self._certificate, "--store", store or str(self.store))
        line = [*within, sys.executable, "-u", "-m", "dapo", "serve", f"{address}:{PORT}", *files]
        return self._start([*line, "--model", "pkg://dapo.tiny/base", "--device", "cpu"])

    def _start(self, line: list[str]) -> Program:
        self.programs.append(Program(line, self._folder / f"log{len(self.programs)}"))
        return self.programs[-1]

    def text(self, program: Program) -> str:
        return (self._folder / f"log{self.programs.index(program)}").read_text()

    def result(self) -> Path:
        return self._folder / "run"

    def has_served(self) -> bool:
        """Whether the engine outside has generated."""
        lines = map(json.loads, (self.result() / "metrics.jsonl").read_text().splitlines())
        return any(line.get("perf/engine/1/tokens_per_s") for line in lines)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    made = Outside(tmp_path)
    yield made
    for program in reversed(made.programs):
        program.process.kill()
        program.process.wait(START_S)


JOINED = "outside of the cluster, has joined, and serves"


@pytest.mark.parametrize("staleness", [(), LAGS], ids=["0", "1"])
def test_an_engine_outside_that_is_killed_comes_again_and_leaves(
    outside: Outside, tmp_path: Path, staleness: tuple[str, ...]
) -> None:
    run, engine = outside.run(*staleness), outside.engine()
    run.until(lambda: run.count(JOINED) == 1)
    run.until(lambda: run.count("step ") >= 8)
    engine.process.send_signal(signal.SIGKILL)
    second = outside.engine()
    run.until(lambda: run.count(JOINED) == 2)
    seen = run.count("step ")
    run.until(lambda: run.count("step ") >= seen + 5)
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(START_S) == 0, outside.text(second)
    assert run.process.wait(START_S) == 0, outside.text(run)[-3000:]
    assert "it is told to end where it runs" in outside.text(run)
    assert outside.has_served()
    assert len([*outside.store.iterdir()]) < 100, "old versions are deleted"
    assert_all_draws_are_accounted_for(outside.result())
    if not staleness:
        run_program(tmp_path / "plain", outside.val, *RUN)
        assert outcome(outside.result()) == outcome(tmp_path / "plain")


@contextmanager
def network_namespace() -> Iterator[tuple[str, ...]]:
    """How to run a program that sees nothing of this machine but `HOST`."""
    ip = lambda *words: subprocess.run(["ip", *words], check=True, timeout=60)  # noqa: E731
    ip("netns", "add", SPACE)
    try:
        ip("link", "add", "dapo-host", "type", "veth", "peer", "name", "dapo-guest", "netns", SPACE)
        ip("addr", "add", f"{HOST}/24", "dev", "dapo-host")
        ip("link", "set", "dapo-host", "up")
        ip("-n", SPACE, "addr", "add", f"{GUEST}/24", "dev", "dapo-guest")
        for device in ("lo", "dapo-guest"):
            ip("-n", SPACE, "link", "set", device, "up")
        yield "ip", "netns", "exec", SPACE
    finally:
        ip("netns", "del", SPACE)


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_an_engine_behind_a_slow_link_joins_by_deltas_and_serves(outside: Outside) -> None:
    """20 Mbit/s and 50 ms each way, for stream and store; with LoRA only the buckets of adapted layers change."""
    outside.store.mkdir()
    served = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "http.server",
            str(STORE_PORT),
            "--bind",
            "127.0.0.1",
            "--directory",
            str(outside.store),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        with network_namespace() as within:
            link = SlowLink(HOST, {PORT: PORT, STORE_PORT: STORE_PORT}, bits_per_s=20e6, delay_s=0.05)
            link.start()
            assert link.ready.wait(START_S)
            adapted = ("model.lora.rank=4", "model.lora.alpha=16", "model.lora.target_modules=[q_proj]")
            run = outside.run(*adapted, *SLOWER, *LAGS, "trainer.total_steps=20")
            began = time.monotonic()
            engine = outside.engine(HOST, f"http://{HOST}:{STORE_PORT}", within)
            run.until(lambda: run.count(JOINED) == 1)
            assert run.count(JOINED) == 1, outside.text(engine)[-3000:]
            print(f"joined {time.monotonic() - began:.0f} s after its start")
            assert run.process.wait(START_S) == 0, outside.text(run)[-3000:]
    finally:
        served.kill()
        served.wait(START_S)
    lines = re.findall(r"has version (\d+), ([\d,]+) of ([\d,]+) bytes fetched", outside.text(engine))
    fetched = [int(part.replace(",", "")) for _, part, _ in lines]
    [whole] = {int(part.replace(",", "")) for *_, part in lines}
    print(f"{len(lines)} versions of {whole:,} bytes; fetched {fetched[0]:,}, then {max(fetched[1:]):,} at most")
    print(f"carried: {link.carried[PORT]:,} bytes of messages, {link.carried[STORE_PORT]:,} of weights")
    assert len(lines) >= 5 and fetched[0] <= whole and max(fetched[1:]) < whole / 2
    assert outside.has_served()
    assert_all_draws_are_accounted_for(outside.result())
