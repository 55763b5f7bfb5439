"""The ablation ladder: its plan, and two real rungs on one engine."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from dapo.ablation import __main__ as ablation
from dapo.ablation.__main__ import SMOKE, chosen_rungs, ladder_runs, parse
from dapo.ablation.results import RUNGS, run_folder
from dapo.config.compose import compose, experiments
from dapo.config.paths import resolve_path
from dapo.config.schema import Config
from dapo.faults.signals import caught
from tests.support.ablation.ladder import cells, write_run
from tests.support.runs import Runs, metrics


def test_every_rung_is_an_experiment_and_the_ladder_goes_seed_by_seed(tmp_path: Path) -> None:
    assert {f"ablation/{rung}" for rung in RUNGS} == {name for name in experiments() if name.startswith("ablation/")}
    runs = ladder_runs(chosen_rungs([]), [5, 7], tmp_path, ["trainer.total_steps=3"])
    assert [(run.number, run.rung, run.seed) for run in runs] == [
        (number, rung, seed) for number, (seed, rung) in enumerate(((s, r) for s in (5, 7) for r in RUNGS), 1)
    ]
    assert [run.cfg.trainer.seed for run in runs] == [5] * 7 + [7] * 7
    assert {run.cfg.trainer.total_steps for run in runs} == {3}
    assert runs[-2].cfg.trainer.output_dir == str(tmp_path / "dynamic_sampling-seed7")
    assert runs[-2].cfg.filter_groups.enable and not runs[0].cfg.filter_groups.enable
    assert chosen_rungs(["token_mean", "grpo"]) == ["grpo", "token_mean"]


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {key: leaf for name, branch in tree.items() for key, leaf in leaves(branch, f"{prefix}.{name}").items()}


@pytest.mark.parametrize("rung", [rung for rung, described in RUNGS.items() if described.against])
def test_a_rung_at_7b_changes_what_the_tiny_one_changes(rung: str) -> None:
    changes = []
    for ladder in ("ablation", "ablation_7b"):
        below, above = (leaves(asdict(compose([], f"{ladder}/{name}"))) for name in (RUNGS[rung].against, rung))
        changes.append({key: (below[key], above[key]) for key in below if below[key] != above[key]})
        assert changes[-1].pop(".trainer.output_dir")[1] == f"outputs/{ladder}/{rung}"
    assert changes[0] == changes[1] and len(changes[0]) == 1


def test_the_ladder_at_7b_has_the_same_rungs_and_stands_on_dapo_qwen7b() -> None:
    names = {name for name in experiments() if name.startswith("ablation_7b/")}
    assert names == {f"ablation_7b/{rung}" for rung in RUNGS}
    top, published = (leaves(asdict(compose([], name))) for name in ("ablation_7b/dynamic_sampling", "dapo_qwen7b"))
    changed = {key for key in top if top[key] != published[key]}
    assert changed == {".reward.overlong_filtering.enable", ".trainer.output_dir"}


def test_overrides_may_stand_after_a_list_of_seeds() -> None:
    given, overrides = parse(["--seeds", "4", "2", "trainer.total_steps=3", "--rungs", "grpo", "+x=1", "--out=here"])
    assert (given.seeds, given.rungs, given.out) == ([4, 2], ["grpo"], Path("here"))
    assert overrides == ["trainer.total_steps=3", "+x=1"]


def test_smoke_is_every_rung_at_a_small_size(tmp_path: Path) -> None:
    given, overrides = parse(["--smoke", "eval.n=2"])
    assert (given.seeds, given.rungs, given.out.name, overrides[-1]) == ([0], [], "ablation-smoke", "eval.n=2")
    runs = ladder_runs(chosen_rungs(given.rungs), given.seeds, tmp_path, overrides)
    assert [run.rung for run in runs] == list(RUNGS) and {run.cfg.trainer.total_steps for run in runs} == {2}
    assert parse([])[0].seeds == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--rungs", "clip_hihger"], "unknown rung `clip_hihger`.*did you mean `clip_higher`", id="rung"),
        pytest.param(["trainer.seed=3"], "`trainer.seed` is the ladder's own", id="own-key"),
        pytest.param(["trainer.total_step=3"], "unknown key.*did you mean `trainer.total_steps`", id="unknown-key"),
        pytest.param(["trainer.total_steps=many"], "configuration of rung `grpo`.*many", id="wrong-type"),
        pytest.param(["trainer.device=cuda", "model.dtype=bfloat16"], "`trainer.device` of rung .* is cuda", id="gpu"),
        pytest.param(["--report"], r"no seed with all its rungs finished: seed 0: grpo \(missing\)", id="no-runs"),
    ],
)
def test_errors_end_with_one_message(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ablation.main([*arguments, "--out", str(tmp_path)])
    assert ended.value.code == 1
    errors = capsys.readouterr().err
    assert errors.startswith("dapo: ") and re.search(message, errors.replace("\n", " ")), errors


@pytest.mark.parametrize(
    ("raised", "code"),
    [pytest.param(KeyboardInterrupt, 130, id="Ctrl-C"), pytest.param(asyncio.CancelledError, 85, id="SIGTERM")],
)
def test_an_interrupted_ladder_says_how_to_go_on(
    raised: type[BaseException],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def interrupted(runs: Any) -> None:
        raise raised

    monkeypatch.setattr(ablation, "run_ladder", interrupted)
    with pytest.raises(SystemExit) as ended:
        ablation.main(["--rungs", "grpo", "--seeds", "0", "--out", str(tmp_path)])
    assert ended.value.code == code
    assert "the same command continues the ladder" in capsys.readouterr().err


def test_a_run_whose_directory_another_takes_over_ends_the_ladder_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def engines(cfg: Config) -> AsyncIterator[None]:
        yield

    async def train(cfg: Config, *rest: Any) -> None:
        other = {"token": "another", "pid": "7", "host": "elsewhere", "since": "yesterday"}
        (Path(cfg.trainer.output_dir) / ".lease").write_text(json.dumps(other))
        await asyncio.sleep(5)
        raise RuntimeError("it trained on")

    monkeypatch.setattr("dapo.state.lease.BEAT_S", 0.1)
    monkeypatch.setattr(ablation, "ray_cluster", lambda cfg: nullcontext())
    monkeypatch.setattr(ablation, "build_rollouts", engines)
    monkeypatch.setattr(ablation, "train", train)
    with pytest.raises(SystemExit) as ended:
        ablation.main(["--rungs", "grpo", "--seeds", "0", "--out", str(tmp_path)])
    assert ended.value.code == 1
    assert "was taken over by process 7 on elsewhere" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 85), (signal.SIGUSR1, 85), (signal.SIGHUP, 85)]
)
def test_a_signal_lets_the_run_under_way_save_and_ends_the_ladder(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[str] = []

    @asynccontextmanager
    async def engines(cfg: Config) -> AsyncIterator[None]:
        yield

    async def train(cfg: Config, *rest: Any) -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            saved.append(cfg.trainer.output_dir)
            raise

    def cluster(cfg: Config) -> AbstractContextManager[None]:
        signal.signal(signal.SIGTERM, lambda *_: None)  # as Ray does
        return nullcontext()

    monkeypatch.setattr(ablation, "ray_cluster", cluster)
    monkeypatch.setattr(ablation, "build_rollouts", engines)
    monkeypatch.setattr(ablation, "train", train)
    before = {each: signal.signal(each, lambda *_: None) for each in caught()}
    try:
        with pytest.raises(SystemExit) as ended:
            ablation.main(["--rungs", "grpo", "--seeds", "0", "1", "--out", str(tmp_path)])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert ended.value.code == code and saved == [str(run_folder(tmp_path, "grpo", 0))]


def test_rungs_that_need_other_engines_are_refused(tmp_path: Path) -> None:
    runs = ladder_runs(["grpo", "clip_higher"], [0, 1], tmp_path, [])
    ablation.check_engine(runs)  # the seeds differ, and nothing of the engine depends on them
    runs[3].cfg.data.max_response_length += 1
    with pytest.raises(ValueError, match="`engine argument max_model_len` is .* in rung `grpo` and .* `clip_higher`"):
        ablation.check_engine(runs)


def test_a_finished_run_of_other_settings_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "grpo", 0, [0.1, 0.2], total_steps=60)
    config = run_folder(tmp_path, "grpo", 0) / "config.yaml"
    cfg = ablation.compose_run("grpo", 0, tmp_path, ["trainer.total_steps=60"])
    config.write_text(yaml.safe_dump(asdict(cfg)))
    assert len(ladder_runs(["grpo"], [0], tmp_path, ["trainer.total_steps=70"])) == 1, "more steps continue a run"
    cfg.actor.optim.lr = 0.5
    config.write_text(yaml.safe_dump(asdict(cfg)))
    with pytest.raises(ValueError, match=r"holds a run of other settings: `actor.optim.lr` is 0.5 there and 0.25 here"):
        ladder_runs(["grpo"], [0], tmp_path, ["actor.optim.lr=0.25"])


# A learning rate at which an engine that kept the weights of the run before would be far off.
SMALL = ("actor.optim.lr=1e-3", "actor.optim.lr_warmup_steps=0", "actor.max_tokens_per_gpu=256")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Small settings, with 16 held-out prompts."""
    path = tmp_path_factory.mktemp("data") / "val.parquet"
    pq.write_table(pq.read_table(resolve_path("pkg://dapo.tiny/data/val.parquet")).slice(0, 16), path)
    return [*SMALL, f"data.val_files=[{path}]"]


def run_program(module: str, arguments: list[str], log: Path) -> tuple[str, dict[str, set[int]]]:
    """Output of a program, and the process ids of every engine and actor rank that it ever had."""
    seen: dict[str, set[int]] = {"EngineCore": set(), "ActorWorker": set()}
    deadline = time.monotonic() + 1000
    with log.open("w") as file:
        program = [sys.executable, "-u", "-m", module, *arguments]
        process = subprocess.Popen(program, stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            for child in psutil.Process(process.pid).children(recursive=True):
                try:
                    line = " ".join(child.cmdline())
                except psutil.Error:
                    continue
                for name, pids in seen.items():
                    if name in line:
                        pids.add(child.pid)
            time.sleep(0.3)
    assert process.returncode == 0, log.read_text()
    return log.read_text(), seen


@pytest.mark.ray
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "rungs",
    [
        pytest.param(["grpo", "overlong_filtering", "dynamic_sampling"], id="three"),
        pytest.param(list(RUNGS), id="all", marks=pytest.mark.long),
    ],
)
def test_rungs_on_one_engine(runs: Runs, tmp_path: Path, overrides: list[str], rungs: list[str]) -> None:
    """The second run equals, in every metric, the same run on another engine; done again, nothing starts."""
    arguments = ["--smoke", "--rungs", *rungs, "--seeds", "1", "--out", str(tmp_path / "out"), *overrides]
    output, seen = run_program("dapo.ablation", arguments, tmp_path / "ladder.log")
    for number, rung in enumerate(rungs, 1):
        assert f"rung {number}/{len(rungs)} {rung} · seed 1 · run {number}/{len(rungs)}" in output
    assert len(seen["EngineCore"]) == 1, "one engine for all runs"
    assert len(seen["ActorWorker"]) == len(rungs), "a new rank for each run"

    first, second = (metrics(tmp_path / "out" / f"{rung}-seed1") for rung in ("grpo", "overlong_filtering"))
    assert first[0]["step"] == 1 and any(line.get("actor/grad_norm", 0) > 0 for line in first), (
        "the engine's weights change"
    )
    for name in (key for key in first[0] if key.startswith(("rollout/", "buffer/"))):
        assert first[0][name] == second[0][name], f"{name}: both begin with the base model"
    assert second[0]["parity/max_abs_logprob_diff"] <= 1e-4

    own = [*SMOKE, *overrides, "trainer.seed=1", f"trainer.output_dir={tmp_path / 'alone'}"]
    alone = runs.train(compose(own, "ablation/overlong_filtering"))
    assert metrics(alone) == second

    again, seen = run_program("dapo.ablation", arguments, tmp_path / "again.log")
    assert f"{len(rungs)} of {len(rungs)} runs are finished already" in again and "ready after" not in again
    assert seen == {"EngineCore": set(), "ActorWorker": set()}
    assert len(cells((tmp_path / "out" / "ablation.md").read_text())) == len(rungs)
