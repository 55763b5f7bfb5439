"""The ablation ladder: its rungs, its table of made-up runs, and two real rungs."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from dapo.config.compose import compose, experiments
from dapo.config.paths import resolve_path
from dapo.state.run_dir import HEADER
from dapo.tools.ablation import __main__ as ablation
from dapo.tools.ablation.__main__ import RUNGS, command, interval, parse, read_ladder, report


def write_run(out: Path, rung: str, seed: int, accuracies: list[float | None], total_steps: int | None = None) -> None:
    """A run with one step per accuracy after the first, which is that of the base model."""
    folder = out / f"{rung}-seed{seed}"
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": accuracies[0]}]
    for step, accuracy in enumerate(accuracies[1:], 1):
        line = {
            "rollout/accuracy": 0.5,
            "perf/step_s": 1.5,
            "ledger/tokens_generated": 1.5e6 * step,
            "ledger/goodput": 0.7,
        }
        line |= {"buffer/trained_tokens": 1e6, "buffer/dropped_tokens": 4e5, "perf/aborted_tokens": 1e5}
        records += [{"step": step, **line}, {"step": step, "eval/accuracy": accuracy}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    steps = len(accuracies) - 1 if total_steps is None else total_steps
    (folder / "config.yaml").write_text(HEADER + yaml.safe_dump({"trainer": {"total_steps": steps}}))


def cells(text: str) -> list[list[str]]:
    """The rows of the first table below its head."""
    lines = text.split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_rung_is_an_experiment_and_its_command_composes(tmp_path: Path) -> None:
    assert {f"ablation/{rung}" for rung in RUNGS} == {name for name in experiments() if name.startswith("ablation/")}
    given, overrides = parse(["--seeds", "4", "2", "trainer.total_steps=3", "--rungs", "grpo", "+x=1", "--out=here"])
    assert (given.seeds, given.rungs, given.out) == ([4, 2], ["grpo"], Path("here"))
    assert overrides == ["trainer.total_steps=3", "+x=1"]
    words = command("dynamic_sampling", 7, tmp_path, ["trainer.total_steps=3"])
    assert words[:3] == [sys.executable, "-m", "dapo.main_ppo"]
    cfg = compose(words[3:], None)
    assert (cfg.trainer.seed, cfg.trainer.total_steps) == (7, 3)
    assert cfg.trainer.output_dir == str(tmp_path / "dynamic_sampling-seed7")


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
    ("arguments", "code", "message"),
    [
        (["--rungs", "clip_hihger"], 2, "invalid choice: 'clip_hihger'"),
        (["trainer.total_step=3"], 1, "dapo: the same command continues the ladder"),
        (["--report"], 1, r"dapo: no seed has all of its rungs: .*grpo-seed0 is no run"),
    ],
)
def test_errors_end_the_ladder(
    arguments: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ablation.main([*arguments, "--out", str(tmp_path)])
    assert ended.value.code == code
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_an_interval_is_students() -> None:
    assert interval([0.50, 0.60, 0.70], ".3f") == "0.600 ± 0.248"  # 4.303 x 0.1 / sqrt(3)
    assert interval([0.5], ".3f") == "0.500"
    assert interval([0.10, 0.11, 0.12], "+.3f") == "+0.110 ± 0.025"
    assert interval([0.10, 0.00, 0.12], "+.3f").endswith("(unresolved)")


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    """The seeds lie 0.2 apart, the rungs 0.1 within each seed: only the paired interval tells them apart."""
    for seed, base in enumerate((0.3, 0.5, 0.7)):
        write_run(tmp_path, "grpo", seed, [0.2, base])
        write_run(tmp_path, "overlong_filtering", seed, [0.2, base + 0.09 + 0.01 * seed])
        write_run(tmp_path, "clip_higher", seed, [0.2, base + 0.1 * (seed - 1)])
    rows = cells(report(*read_ladder(tmp_path, ["grpo", "overlong_filtering", "clip_higher"], [0, 1, 2])))
    assert rows[0] == ["1 naive GRPO", "0.500 ± 0.497", "", "", "1.50", "2", "30"]
    assert rows[1][:4] == ["2 + overlong filtering", "0.600 ± 0.522", "+0.100 ± 0.025", "1"]
    assert rows[2][2:4] == ["-0.100 ± 0.224 (unresolved)", "2"]


def test_unfinished_seeds_are_left_out_by_name(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path, "grpo", seed, [0.1, 0.5])
        write_run(tmp_path, "clip_higher", seed, [0.1, 0.6])
    write_run(tmp_path, "grpo", 2, [0.1, 0.9], total_steps=5)
    write_run(tmp_path, "grpo", 4, [0.1, None])
    text = report(*read_ladder(tmp_path, ["grpo", "clip_higher"], [0, 1, 2, 4]))
    assert [row[1][:5] for row in cells(text)] == ["0.500", "0.600"]
    assert "seeds 0, 1 " in text and "Left out: grpo-seed2 has 1 of 5 steps" in text and "grpo-seed4 has" in text


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.parametrize(
    "rungs",
    [
        pytest.param(["grpo", "overlong_filtering"], id="two"),
        pytest.param(list(RUNGS), id="all", marks=pytest.mark.long),
    ],
)
def test_real_rungs_give_a_table_and_a_picture(tmp_path: Path, rungs: list[str]) -> None:
    image = pytest.importorskip("matplotlib.image")
    val = tmp_path / "val.parquet"
    pq.write_table(pq.read_table(resolve_path("pkg://dapo.tiny/data/val.parquet")).slice(0, 16), val)
    out = tmp_path / "out"
    words = ["--smoke", "--rungs", *rungs, "--seeds", "1", "--out", str(out), f"data.val_files=[{val}]"]
    ablation.main(words)
    lines = {rung: (out / f"{rung}-seed1" / "metrics.jsonl").read_text() for rung in rungs}
    assert len(cells((out / "ablation.md").read_text())) == len(rungs)
    assert image.imread(out / "ablation.png")[:, :, :3].std() > 0.05
    ablation.main(words)  # done again, nothing is trained
    assert lines == {rung: (out / f"{rung}-seed1" / "metrics.jsonl").read_text() for rung in rungs}
