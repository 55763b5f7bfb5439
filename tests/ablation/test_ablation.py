"""The ablation ladder: its plan, its table of made-up runs, and real rungs on one engine."""

import json
import math
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from dapo.ablation import __main__ as ablation
from dapo.ablation.__main__ import SMOKE, chosen_rungs, ladder_runs, parse
from dapo.ablation.report import table
from dapo.ablation.results import RUNGS, T_975, estimate, read_ladder, read_run, run_folder
from dapo.config.compose import compose, experiments
from dapo.config.paths import resolve_path
from tests.support.runs import Runs, metrics


def write_run(
    out: Path,
    rung: str,
    seed: int,
    accuracies: list[float | None],
    total_steps: int | None = None,
    entropy: float = 0.5,
) -> None:
    """A run with one step per accuracy after the first, which is that of the base model. entropy: of the first step."""
    folder = run_folder(out, rung, seed)
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": accuracies[0]}]
    for step, accuracy in enumerate(accuracies[1:], 1):
        line = {"buffer/trained_tokens": 1e6, "buffer/dropped_tokens": 4e5, "perf/aborted_tokens": 1e5}
        line |= {"buffer/drawn": 10, "buffer/all_correct": step, "buffer/all_wrong": 3, "perf/step_s": 1.5}
        line |= {"rollout/truncated": 0.2 / step, "rollout/response_length_mean": 30.0 + step}
        line |= {"actor/optimizer_steps": 4.0, "actor/entropy": entropy / step, "actor/clip_fraction": 0.01}
        records += [{"step": step, **line, "actor/grad_norm": 0.5 * step}, {"step": step, "eval/accuracy": accuracy}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    steps = len(accuracies) - 1 if total_steps is None else total_steps
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": {"total_steps": steps}}))


def cells(text: str) -> list[list[str]]:
    """The rows of the first table below its head."""
    lines = text.split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_rung_is_an_experiment_and_the_ladder_goes_seed_by_seed(tmp_path: Path) -> None:
    assert {f"ablation/{rung}" for rung in RUNGS} == {name for name in experiments() if name.startswith("ablation/")}
    runs = ladder_runs(chosen_rungs([]), [5, 7], tmp_path, ["trainer.total_steps=3"])
    assert [(run.number, run.rung, run.seed) for run in runs] == [
        (number, rung, seed) for number, (seed, rung) in enumerate(((s, r) for s in (5, 7) for r in RUNGS), 1)
    ]
    assert [run.cfg.trainer.seed for run in runs] == [5] * 7 + [7] * 7
    assert {run.cfg.trainer.total_steps for run in runs} == {3}
    assert runs[-2].cfg.trainer.output_dir == str(tmp_path / "dynamic_sampling-seed7")
    assert chosen_rungs(["token_mean", "grpo"]) == ["grpo", "token_mean"]
    given, overrides = parse(["--seeds", "4", "2", "trainer.total_steps=3", "--rungs", "grpo", "+x=1", "--out=here"])
    assert (given.seeds, given.rungs, given.out) == ([4, 2], ["grpo"], Path("here"))
    assert overrides == ["trainer.total_steps=3", "+x=1"]


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {key: leaf for name, branch in tree.items() for key, leaf in leaves(branch, f"{prefix}.{name}").items()}


def composed(name: str) -> dict[str, Any]:
    return leaves(asdict(compose([], name)))


def test_a_rung_changes_one_key_at_7b_as_at_the_tiny_size() -> None:
    for rung in (rung for rung, described in RUNGS.items() if described.against):
        changes = []
        for ladder in ("ablation", "ablation_7b"):
            below, above = (composed(f"{ladder}/{name}") for name in (RUNGS[rung].against, rung))
            changes.append({key: (below[key], above[key]) for key in below if below[key] != above[key]})
            assert changes[-1].pop(".trainer.output_dir")[1] == f"outputs/{ladder}/{rung}"
        assert changes[0] == changes[1] and len(changes[0]) == 1, rung
    top, published = composed("ablation_7b/dynamic_sampling"), composed("dapo_qwen7b")
    changed = {key for key in top if top[key] != published[key]}
    assert changed == {".reward.overlong_filtering.enable", ".trainer.output_dir"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rungs", "clip_hihger"], "unknown rung `clip_hihger`.*did you mean `clip_higher`"),
        (["trainer.seed=3"], "`trainer.seed` is the ladder's own"),
        (["trainer.total_step=3"], "unknown key.*did you mean `trainer.total_steps`"),
        (["trainer.device=cuda", "model.dtype=bfloat16"], "`trainer.device` of rung .* is cuda"),
        (["--report"], r"no seed with all its rungs finished: seed 0: grpo \(missing\)"),
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


def test_runs_of_other_engines_or_other_settings_are_refused(tmp_path: Path) -> None:
    runs = ladder_runs(["grpo", "clip_higher"], [0, 1], tmp_path, [])
    ablation.check_engine(runs)  # the seeds differ, and nothing of the engine depends on them
    runs[3].cfg.data.max_response_length += 1
    with pytest.raises(ValueError, match="`engine argument max_model_len` is .* in rung `grpo` and .* `clip_higher`"):
        ablation.check_engine(runs)
    write_run(tmp_path, "grpo", 0, [0.1, 0.2], total_steps=60)
    config = run_folder(tmp_path, "grpo", 0) / "config.yaml"
    cfg = ablation.compose_run("grpo", 0, tmp_path, ["trainer.total_steps=60"])
    config.write_text(yaml.safe_dump(asdict(cfg)))
    assert len(ladder_runs(["grpo"], [0], tmp_path, ["trainer.total_steps=70"])) == 1, "more steps continue a run"
    cfg.actor.optim.lr = 0.5
    config.write_text(yaml.safe_dump(asdict(cfg)))
    with pytest.raises(ValueError, match=r"holds a run of other settings: `actor.optim.lr` is 0.5 there and 0.25 here"):
        ladder_runs(["grpo"], [0], tmp_path, ["actor.optim.lr=0.25"])


def student_t_cdf(t: float, df: int) -> float:
    """Integrates the density by Simpson's rule."""
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    count = 2000
    values = [scale * (1 + (t * i / count) ** 2 / df) ** (-(df + 1) / 2) for i in range(count + 1)]
    weights = [1, *([4, 2] * (count // 2))[: count - 1], 1]
    return 0.5 + t / count / 3 * sum(w * v for w, v in zip(weights, values, strict=True))


def test_intervals_by_hand() -> None:
    for df in (1, 2, 3, 5, 10, 20, 30):
        assert student_t_cdf(T_975[df - 1], df) == pytest.approx(0.975, abs=2e-5)
    found = estimate([0.50, 0.60, 0.70])
    assert found.mean == pytest.approx(0.6)
    assert found.half_width == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert estimate([0.10, 0.11, 0.12]).resolved and estimate([-0.10, -0.11, -0.12]).resolved
    for values in ([0.10, 0.00, 0.12], [0.5], [0.0, 0.0]):
        assert not estimate(values).resolved, "the interval contains 0, or there is none"


def test_a_run_is_read_with_its_totals(tmp_path: Path) -> None:
    write_run(tmp_path, "grpo", 0, [0.4, 0.5, 0.7])
    run = read_run(run_folder(tmp_path, "grpo", 0))
    assert (run.accuracy, run.optimizer_steps) == (((0, 0.4), (1, 0.5), (2, 0.7)), (0.0, 4.0, 8.0))
    assert (run.tokens, run.seconds) == ((0.0, 1.5e6, 3.0e6), (0.0, 1.5, 3.0))
    assert run.of_steps["truncated"] == (0.2, 0.1) and run.of_steps["all_correct"] == (0.1, 0.2)


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    """The seeds lie 0.2 apart, the rungs 0.1 within each seed: only the paired interval tells them apart."""
    for seed, base in enumerate((0.3, 0.5, 0.7)):
        write_run(tmp_path, "grpo", seed, [0.2, base])
        write_run(tmp_path, "clip_higher", seed, [0.2, base + 0.09 + 0.01 * seed])
        write_run(tmp_path, "token_mean", seed, [0.2, base + 0.1 * (seed - 1)])
    naive, clip, token = cells(table(*read_ladder(tmp_path, ["grpo", "clip_higher", "token_mean"], [0, 1, 2])))
    assert naive == [
        *("1 naive GRPO", "0.500 ± 0.497", "", "", "1.50", "4", "2", "10%, 30%"),
        *("20.0% → 20.0%", "31 → 31", "0.500 → 0.500", "1.00%", "30"),
    ]
    assert clip[:4] == ["2 + clip-higher", "0.600 ± 0.522", "+0.100 ± 0.025", "1"]
    assert token[2:4] == ["-0.100 ± 0.224 (unresolved)", "2"]


@pytest.mark.parametrize(
    ("entropies", "here"),
    [
        ([0.30, 0.31, 0.33], "held"),
        ([0.10, 0.11, 0.12], "refuted"),
        ([0.10, 0.20, 0.40], "unresolved"),
        ([0.30], "unresolved"),
    ],
)
def test_a_claim_is_a_number_with_its_interval(entropies: list[float], here: str, tmp_path: Path) -> None:
    for seed, entropy in enumerate(entropies):
        write_run(tmp_path, "overlong_filtering", seed, [0.2, 0.5], entropy=0.2 + 0.001 * seed)
        write_run(tmp_path, "clip_higher", seed, [0.2, 0.5], entropy=entropy)
    text = table(*read_ladder(tmp_path, ["overlong_filtering", "clip_higher"], list(range(len(entropies)))))
    (row,) = [line for line in text.splitlines() if line.startswith("| clip-higher keeps")]
    assert row.endswith(f"| {here} |") and row.split("|")[3].strip().startswith("+" if here != "refuted" else "-")
    assert ("One seed gives no interval" in text) == (len(entropies) == 1)


def test_unfinished_seeds_are_left_out_by_name(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path, "grpo", seed, [0.1, 0.5])
        write_run(tmp_path, "clip_higher", seed, [0.1, 0.6])
    write_run(tmp_path, "grpo", 2, [0.1, 0.9])
    write_run(tmp_path, "clip_higher", 2, [0.1, 0.9], total_steps=5)
    write_run(tmp_path, "grpo", 4, [0.1, None])
    text = table(*read_ladder(tmp_path, ["grpo", "clip_higher"], [0, 1, 2, 4]))
    assert [row[1][:5] for row in cells(text)] == ["0.500", "0.600"]
    assert "Mean over seeds 0, 1 " in text and "seed 2: clip_higher (1 of 5 steps)" in text
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
    assert [row[0][2:] for row in cells(written)] == [rung.label for rung in RUNGS.values()]
    assert [row[-1] for row in cells(written)] == ["30", "36", "38", "41", "42", "50", ""]
    assert image.imread(tmp_path / "ablation.png")[:, :, :3].std() > 0.05


def run_program(arguments: list[str], log: Path) -> tuple[str, dict[str, set[int]]]:
    """Output of the ladder, and the process ids of every engine and actor rank that it ever had."""
    seen: dict[str, set[int]] = {"EngineCore": set(), "ActorWorker": set()}
    deadline = time.monotonic() + 1000
    with log.open("w") as file:
        program = [sys.executable, "-u", "-m", "dapo.ablation", *arguments]
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
@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "rungs",
    [
        pytest.param(["grpo", "overlong_filtering"], id="two"),
        pytest.param(list(RUNGS), id="all", marks=pytest.mark.long),
    ],
)
def test_rungs_on_one_engine(runs: Runs, tmp_path: Path, rungs: list[str]) -> None:
    """The second run equals, in every metric, the same run on another engine; done again, nothing starts."""
    val = tmp_path / "val.parquet"
    pq.write_table(pq.read_table(resolve_path("pkg://dapo.tiny/data/val.parquet")).slice(0, 16), val)
    # A learning rate at which an engine that kept the weights of the run before would be far off.
    small = ["actor.optim.lr=1e-3", "actor.optim.lr_warmup_steps=0", "actor.max_tokens_per_gpu=256"]
    overrides = [*small, f"data.val_files=[{val}]"]
    arguments = ["--smoke", "--rungs", *rungs, "--seeds", "1", "--out", str(tmp_path / "out"), *overrides]
    output, seen = run_program(arguments, tmp_path / "ladder.log")
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

    again, seen = run_program(arguments, tmp_path / "again.log")
    assert f"{len(rungs)} of {len(rungs)} runs are finished already" in again and "ready after" not in again
    assert seen == {"EngineCore": set(), "ActorWorker": set()}
    assert len(cells((tmp_path / "out" / "ablation.md").read_text())) == len(rungs)
