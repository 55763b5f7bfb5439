"""The real program, every component real: three steps, resume, the same seed twice. How it ends: test_endings."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo.config.paths import resolve_path
from dapo.report.log import read_metrics
from tests.support.cluster import cluster_address, join_cluster, session_directory
from tests.support.runs import Runs, checkpoint, metrics, run_program, samples
from tests.support.sockets import LOOPBACK, command_lines, listening

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def val_file(tmp_path_factory) -> str:
    """32 held-out prompts: evaluation is not what these tests are about."""
    path = tmp_path_factory.mktemp("data") / "val.parquet"
    pq.write_table(pq.read_table(resolve_path("pkg://dapo.tiny/data/val.parquet")).slice(0, 32), path)
    return str(path)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, ray_cluster, val_file) -> tuple[Path, str]:
    """The program on a Ray cluster that it joins; two engines and two FSDP ranks."""
    output_dir = tmp_path_factory.mktemp("whole")
    overrides = ("trainer.total_steps=3", "rollout.num_engines=2", join_cluster())
    overrides += ("logging.watchdog_s=0.2",)  # less than any step takes
    return output_dir, run_program(output_dir, val_file, *overrides)


def weights(output_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint(output_dir) / "hf" / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_three_steps_report_evaluate_and_save(whole_run):
    output_dir, out = whole_run
    lines = read_metrics(output_dir / "metrics.jsonl")
    steps = [line for line in lines if "actor/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 2, 3]
    assert sum(line.startswith("step ") for line in out.splitlines()) == 3
    between = re.findall(r"^in step (\d)/3 · (\w+)", out, re.MULTILINE)
    assert {step for step, _ in between} == {"1", "2", "3"}
    assert {"generating", "updating"} <= {what for _, what in between}
    for line in steps:
        assert line["buffer/mixed"] == line["actor/optimizer_steps"] == 4
        assert line["parity/max_abs_logprob_diff"] <= 1e-4 and line["actor/grad_norm"] > 0
        assert line["perf/restarted_reward_workers"] == line["perf/restarted_reward_children"] == 0
        assert (
            0 <= line["perf/rank/idle"] < 1 and 0 <= line["perf/reward/idle"] <= 1 and 0 < line["perf/engine/idle"] < 1
        )
        assert 0 < line["perf/reward/queue_mean"] < line["perf/reward/queue_max"]
        sizes = [line[f"perf/{role}_bytes"] for role in ("driver_resident", "rank/resident", "reward/resident")]
        assert min(sizes) > 1e7 and line["perf/engine/resident_bytes"] > 1e8
        assert not {name for name in line if name.endswith(("mfu", "gpu_peak_bytes", "per_gpu"))}, "there is no GPU"
        rates = [line.get(f"perf/engine/{name}tokens_per_s", 0.0) for name in ("", "0/", "1/")]
        assert rates[0] == pytest.approx(rates[1] + rates[2]) and rates[0] > 0
    penalties = [line["reward/kl_penalty"] for line in steps]
    assert abs(penalties[0]) <= 1e-6, "the policy is still the reference"
    assert max(penalties[1:]) < penalties[0]
    assert checkpoint(output_dir).name == "step_000003" and list((output_dir / "tensorboard").iterdir())
    assert samples(output_dir)
    with closing(sqlite3.connect(output_dir / "samples.sqlite")) as store:
        assert store.execute("SELECT DISTINCT engine FROM responses ORDER BY engine").fetchall() == [(0,), (1,)]
        kept = store.execute("SELECT step, count(*), count(text) FROM evaluations GROUP BY step ORDER BY step")
        assert kept.fetchall() == [(0, 32, 32), (2, 32, 32), (3, 32, 32)]
        assert store.execute("SELECT count(*) FROM events WHERE kind = 'save'").fetchall() == [(2,)]
    trace = json.loads((output_dir / "trace.json").read_text().rstrip(",\n") + "]")
    assert {"step", "generation", "update", "sync", "save"} < {each["name"] for each in trace}
    found = json.loads((output_dir / "summary.json").read_text())
    assert found["steps"] == 3 and found["starts"] == 1 and not any(found["faults"].values())
    assert found["tokens_trained"] == sum(line["buffer/trained_tokens"] for line in steps)
    [held_out] = found["held_out"]
    evaluations = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    assert (held_out["first"]["value"], held_out["last"]["value"]) == (evaluations[0], evaluations[-1])
    assert "summary: 3 of 3 steps in " in out and "cost: CPU" in out
    assert (output_dir / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_export_loads_and_differs_from_the_base(whole_run):
    directory = str(checkpoint(whole_run[0]) / "hf")
    trained = AutoModelForCausalLM.from_pretrained(directory)
    base = AutoModelForCausalLM.from_pretrained(resolve_path("pkg://dapo.tiny/base"))
    assert AutoTokenizer.from_pretrained(directory).chat_template
    assert not any(torch.equal(a, b) for a, b in zip(trained.parameters(), base.parameters(), strict=True))
    card = ModelCard.load(f"{directory}/README.md")
    assert card.data.eval_results and "| steps | 3 of 3 |" in card.text and "](curve.png)" in card.text


def test_a_stopped_and_resumed_run_equals_the_whole_one(whole_run, tmp_path, val_file, runs: Runs, capsys):
    """Also the same seed twice, one engine where the whole run had two, and checkpoints written beside the steps: none
    may change a single bit, nor what else the engine was used for."""
    output_dir, held_out = tmp_path / "parts", f"data.val_files=[{val_file}]"
    beside = ("checkpoint.async_save=true", "checkpoint.every=1")  # step 2 generates while step 1 is written
    runs.small(output_dir, held_out, "trainer.total_steps=2", "eval.after_train=true", *beside)
    assert metrics(output_dir) == [line for line in metrics(whole_run[0]) if line["step"] <= 2]
    assert "resuming from" not in capsys.readouterr().out
    runs.small(output_dir, held_out, "trainer.total_steps=3")
    assert "resuming from" in capsys.readouterr().out
    assert metrics(output_dir) == metrics(whole_run[0])
    assert samples(output_dir) == samples(whole_run[0])
    assert_same_weights(whole_run[0], output_dir)


def test_a_run_goes_on_with_other_numbers_of_ranks_engines_and_reward_workers(
    whole_run, tmp_path, val_file, runs: Runs, capsys
):
    """Sums in another order round otherwise; there were two ranks, two engines and one reward worker."""
    output_dir = shutil.copytree(whole_run[0], tmp_path / "other")
    shutil.rmtree(output_dir / "checkpoints" / "step_000003")
    others = ("actor.num_workers=1", "rollout.num_engines=1", "reward.num_workers=2")
    runs.small(output_dir, f"data.val_files=[{val_file}]", "trainer.total_steps=3", *others)
    assert "step_000002" in capsys.readouterr().out
    first, second = weights(whole_run[0]), weights(output_dir)
    assert max(float((first[name] - second[name]).abs().max()) for name in first) <= 1e-6
    whole, found = ([line for line in metrics(path) if line["step"] == 3] for path in (whole_run[0], output_dir))
    for one, other in zip(whole, found, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-6)


@pytest.fixture(scope="module")
def without(tmp_path_factory, runs: Runs) -> tuple[Path, list[tuple[str, str]], str]:
    """A run without evaluations, the sockets of all processes in its second step, and all command lines."""
    output_dir, seen = tmp_path_factory.mktemp("without") / "run", []

    def look(engines: object) -> bool:
        if (output_dir / "metrics.jsonl").exists():  # ranks and engines have met
            seen.append((listening(), command_lines()))
        return bool(seen)

    runs.small(output_dir, "trainer.total_steps=3", "weight_sync.transport=broadcast", beside=look)
    return output_dir, *seen[0]


def test_nothing_listens_beyond_this_machine_and_the_token_is_in_no_file_and_on_no_command_line(without):
    output_dir, sockets, lines = without
    names = {name for name, _ in sockets}
    assert {"gcs_server", "raylet"} <= names and any("ActorWorker" in name for name in names), names
    assert [each for each in sockets if each[1] not in LOOPBACK] == []
    token = os.environ["RAY_AUTH_TOKEN"]
    assert "raylet" in lines and token not in lines
    logs = [path for path in Path(session_directory()).rglob("*") if path.is_file()]
    files = [*logs, *(path for path in output_dir.rglob("*") if path.is_file())]
    assert len(logs) > 10 and [path for path in files if token.encode() in path.read_bytes()] == []


def test_who_has_no_token_is_refused(ray_cluster, tmp_path):
    """Ray's head refuses it, to which whoever wants more must come first."""
    script = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
    line = [sys.executable, "-c", script, cluster_address()]
    known = os.environ | {"HOME": str(tmp_path)}
    unknown = {name: value for name, value in known.items() if not name.startswith("RAY_AUTH_")}
    allowed, refused = (subprocess.run(line, env=each, capture_output=True, text=True) for each in (known, unknown))
    assert allowed.returncode == 0, allowed.stderr
    assert refused.returncode != 0 and "InvalidAuthToken" in refused.stderr


def test_what_is_trained_is_the_same_without_evaluations(whole_run, without):
    """The whole run has evaluated versions 0, 2 and 3 at its side."""
    assert metrics(without[0]) == [line for line in metrics(whole_run[0]) if "actor/loss" in line]
    assert_same_weights(whole_run[0], without[0])
