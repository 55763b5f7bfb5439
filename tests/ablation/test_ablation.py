"""The ablation ladder: its plan and report on made-up runs, and two real rungs on one engine."""

import asyncio
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from dapo.ablation import __main__ as ablation
from dapo.ablation.__main__ import chosen_rungs, ladder_runs, parse
from dapo.ablation.report import table, write_report
from dapo.ablation.results import RUNGS, T_975, Curve, estimate, read_ladder, read_run, run_folder
from dapo.config.compose import compose, experiments
from dapo.config.paths import resolve_path
from tests.support.runs import Runs, metrics


def write_run(out: Path, rung: str, seed: int, accuracies: list[float | None], total_steps: int | None = None) -> None:
    """A run with one step per accuracy after the first, which is that of the base model."""
    folder = run_folder(out, rung, seed)
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": accuracies[0]}]
    for step, accuracy in enumerate(accuracies[1:], 1):
        tokens = {"buffer/trained_tokens": 1e6, "buffer/dropped_tokens": 4e5, "perf/aborted_tokens": 1e5}
        rollout = {"rollout/truncated": 0.2 / step, "rollout/response_length_mean": 30.0 + step}
        records.append({"step": step, **tokens, **rollout, "actor/optimizer_steps": 4.0, "perf/step_s": 1.5})
        records.append({"step": step, "eval/accuracy": accuracy})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    steps = len(accuracies) - 1 if total_steps is None else total_steps
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": {"total_steps": steps}}))


def student_t_cdf(t: float, df: int) -> float:
    """Integrates the density by Simpson's rule."""
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    count = 2000
    values = [scale * (1 + (t * i / count) ** 2 / df) ** (-(df + 1) / 2) for i in range(count + 1)]
    weights = [1, *([4, 2] * (count // 2))[: count - 1], 1]
    return 0.5 + t / count / 3 * sum(w * v for w, v in zip(weights, values, strict=True))


@pytest.mark.parametrize("df", [1, 2, 3, 5, 10, 20, 30])
def test_the_quantiles_are_those_of_the_distribution(df: int) -> None:
    assert student_t_cdf(T_975[df - 1], df) == pytest.approx(0.975, abs=2e-5)


def test_an_interval_by_hand() -> None:
    found = estimate([0.50, 0.60, 0.70])
    assert found.mean == pytest.approx(0.6)
    assert found.half_width == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert estimate([0.01, 0.03]).half_width == pytest.approx(12.706 * 0.01)


@pytest.mark.parametrize(
    ("values", "resolved"),
    [
        pytest.param([0.10, 0.11, 0.12], True, id="above-0"),
        pytest.param([-0.10, -0.11, -0.12], True, id="below-0"),
        pytest.param([0.10, 0.00, 0.12], False, id="contains-0"),
        pytest.param([0.5], False, id="one-seed"),
        pytest.param([0.0, 0.0], False, id="no-difference"),
    ],
)
def test_resolved_means_that_the_interval_leaves_out_0(values: list[float], resolved: bool) -> None:
    assert estimate(values).resolved == resolved


def test_a_run_is_read_with_its_totals(tmp_path: Path) -> None:
    write_run(tmp_path, "grpo", 0, [0.4, 0.5, 0.7])
    run = read_run(run_folder(tmp_path, "grpo", 0))
    assert run == Curve(
        accuracy=((0, 0.4), (1, 0.5), (2, 0.7)),
        optimizer_steps=(0.0, 4.0, 8.0),
        tokens=(0.0, 1.5e6, 3.0e6),
        truncated=(0.2, 0.1),
        last_length=32.0,
        seconds=3.0,
    )


def cells(text: str) -> list[list[str]]:
    """The rows of the table below its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    """The seeds lie 0.2 apart, the rungs 0.1 within each seed: only the paired interval tells them apart."""
    for seed, base in enumerate((0.3, 0.5, 0.7)):
        write_run(tmp_path, "grpo", seed, [0.2, base])
        write_run(tmp_path, "clip_higher", seed, [0.2, base + 0.09 + 0.01 * seed])
        write_run(tmp_path, "token_mean", seed, [0.2, base + 0.1 * (seed - 1)])
    naive, clip, token = cells(table(*read_ladder(tmp_path, ["grpo", "clip_higher", "token_mean"], [0, 1, 2])))
    assert naive == ["naive GRPO", "0.500 ± 0.497", "", "1.50", "4", "20.0% → 20.0%", "31.0", "2", "30"]
    assert clip[:3] == ["+ clip-higher", "0.600 ± 0.522", "+0.100 ± 0.025"]
    assert token[2] == "-0.100 ± 0.224 (unresolved)"


def test_one_seed_resolves_nothing(tmp_path: Path) -> None:
    for rung, accuracy in (("grpo", 0.1), ("overlong_filtering", 0.9)):
        write_run(tmp_path, rung, 3, [0.1, accuracy])
    text = table(*read_ladder(tmp_path, ["grpo", "overlong_filtering"], [3]))
    first, second = cells(text)
    assert first[1] == "0.100 ± -" and second[2] == "+0.800 ± - (unresolved)"
    assert "One seed gives no interval" in text


def test_unfinished_seeds_are_left_out_by_name(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path, "grpo", seed, [0.1, 0.5])
        write_run(tmp_path, "clip_higher", seed, [0.1, 0.6])
    write_run(tmp_path, "grpo", 2, [0.1, 0.9])
    write_run(tmp_path, "clip_higher", 2, [0.1, 0.9], total_steps=5)
    write_run(tmp_path, "grpo", 4, [0.1, None])
    text = table(*read_ladder(tmp_path, ["grpo", "clip_higher"], [0, 1, 2, 4]))
    assert [row[1][:5] for row in cells(text)] == ["0.500", "0.600"]
    assert "Mean over seeds 0, 1 " in text
    assert "seed 2: clip_higher (1 of 5 steps)" in text
    assert "seed 4: grpo (no evaluation at step 1); seed 4: clip_higher (missing)" in text
    with pytest.raises(ValueError, match=r"no seed with all its rungs finished: seed 2: clip_higher \(1 of 5 steps\)"):
        read_ladder(tmp_path, ["grpo", "clip_higher"], [2])


def test_the_report_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("matplotlib.image")
    for number, rung in enumerate(RUNGS):
        for seed in (0, 1, 2):
            write_run(tmp_path, rung, seed, [0.4, 0.5 + 0.01 * seed, 0.6 + 0.05 * number + 0.01 * seed])
    ablation.main(["--report", "--out", str(tmp_path)])
    written = (tmp_path / "ablation.md").read_text()
    assert capsys.readouterr().out.strip() == written.strip()
    assert [row[0] for row in cells(written)] == [label for label, _ in RUNGS.values()]
    assert [row[-1] for row in cells(written)] == ["30", "36", "38", "41", "42", "50"]
    first = (tmp_path / "ablation.png").read_bytes()
    assert first.startswith(b"\x89PNG") and image.imread(tmp_path / "ablation.png")[:, :, :3].std() > 0.05
    write_report(tmp_path, list(RUNGS), [0])
    assert (tmp_path / "ablation.png").read_bytes() != first, "the picture shows what it is given"


def test_every_rung_is_an_experiment_and_the_ladder_goes_seed_by_seed(tmp_path: Path) -> None:
    assert {f"ablation/{rung}" for rung in RUNGS} == {name for name in experiments() if name.startswith("ablation/")}
    runs = ladder_runs(chosen_rungs([]), [5, 7], tmp_path, ["trainer.total_steps=3"])
    assert [(run.number, run.rung, run.seed) for run in runs] == [
        (number, rung, seed) for number, (seed, rung) in enumerate(((s, r) for s in (5, 7) for r in RUNGS), 1)
    ]
    assert [run.cfg.trainer.seed for run in runs] == [5] * 6 + [7] * 6
    assert {run.cfg.trainer.total_steps for run in runs} == {3}
    assert runs[-1].cfg.trainer.output_dir == str(tmp_path / "dynamic_sampling-seed7")
    assert runs[-1].cfg.filter_groups.enable and not runs[0].cfg.filter_groups.enable
    assert chosen_rungs(["token_mean", "grpo"]) == ["grpo", "token_mean"]


def test_overrides_may_stand_after_a_list_of_seeds() -> None:
    given, overrides = parse(["--seeds", "4", "2", "trainer.total_steps=3", "--rungs", "grpo", "+x=1", "--out=here"])
    assert (given.seeds, given.rungs, given.out) == ([4, 2], ["grpo"], Path("here"))
    assert overrides == ["trainer.total_steps=3", "+x=1"]


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


def test_rungs_that_need_other_engines_are_refused(tmp_path: Path) -> None:
    runs = ladder_runs(["grpo", "clip_higher"], [0, 1], tmp_path, [])
    ablation.check_engine(runs)  # the seeds differ, and nothing of the engine depends on them
    runs[3].cfg.data.max_response_length += 1
    with pytest.raises(ValueError, match="`engine argument max_model_len` is .* in rung `grpo` and .* `clip_higher`"):
        ablation.check_engine(runs)


def test_a_finished_run_of_other_settings_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "grpo", 0, [0.1, 0.2], total_steps=60)
    assert len(ladder_runs(["grpo"], [0], tmp_path, ["trainer.total_steps=70"])) == 1, "more steps continue a run"
    config = run_folder(tmp_path, "grpo", 0) / "config.yaml"
    config.write_text(yaml.safe_dump({"actor": {"optim": {"lr": 0.5}}, "trainer": {"total_steps": 60}}))
    with pytest.raises(ValueError, match=r"holds a run of other settings: `actor.optim.lr` is 0.5 there and 0.25 here"):
        ladder_runs(["grpo"], [0], tmp_path, ["actor.optim.lr=0.25"])


# A learning rate at which an engine that kept the weights of the run before would be far off.
SMALL = (
    *("trainer.total_steps=1", "data.train_batch_size=8", "data.gen_batch_size=16", "actor.ppo_mini_batch_size=4"),
    *(
        "rollout.n=4",
        "eval.n=2",
        "actor.max_tokens_per_gpu=256",
        "actor.optim.lr=1e-3",
        "actor.optim.lr_warmup_steps=0",
    ),
)


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
def test_two_rungs_on_one_engine(runs: Runs, tmp_path: Path, overrides: list[str]) -> None:
    """The second run equals, in every metric, the same run on another engine; done again, nothing starts."""
    arguments = ["--seeds", "1", "--rungs", "grpo", "overlong_filtering", "--out", str(tmp_path / "out"), *overrides]
    output, seen = run_program("dapo.ablation", arguments, tmp_path / "ladder.log")
    assert "rung 1/2 grpo · seed 1 · run 1/2" in output and "rung 2/2 overlong_filtering · seed 1 · run 2/2" in output
    assert len(seen["EngineCore"]) == 1, "one engine for both runs"
    assert len(seen["ActorWorker"]) == 4, "two new ranks for each run"

    first, second = (metrics(tmp_path / "out" / f"{rung}-seed1") for rung in ("grpo", "overlong_filtering"))
    assert first[0] == second[0], "both begin with the base model"
    assert first[1]["actor/grad_norm"] > 0 and first[2] != {**first[0], "step": 1}, "the first run left other weights"
    for name in (key for key in first[1] if key.startswith(("rollout/", "buffer/"))):
        assert first[1][name] == second[1][name], name
    assert second[1]["parity/max_abs_logprob_diff"] <= 1e-4

    own = [*overrides, "trainer.seed=1", f"trainer.output_dir={tmp_path / 'alone'}"]
    alone = runs.train(compose(own, "ablation/overlong_filtering"))
    assert metrics(alone) == second

    again, seen = run_program("dapo.ablation", arguments, tmp_path / "again.log")
    assert "2 of 2 runs are finished already" in again and "ready after" not in again
    assert seen == {"EngineCore": set(), "ActorWorker": set()}
    assert len(cells((tmp_path / "out" / "ablation.md").read_text())) == 2
