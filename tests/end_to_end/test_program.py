"""The real program, every component real: three steps, resume, the same seed twice, and how a run ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo.config.paths import resolve_path

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

STOP_S = 60  # a deadline against hanging, wide because test machines are shared; a quiet one needs less than 10 s
START_S = 240


@pytest.fixture(scope="module")
def val_file(tmp_path_factory) -> str:
    """32 held-out prompts: evaluation is not what these tests are about."""
    path = tmp_path_factory.mktemp("data") / "val.parquet"
    pq.write_table(pq.read_table(resolve_path("pkg://dapo.tiny/data/val.parquet")).slice(0, 32), path)
    return str(path)


# Two epochs of two shuffled mini-batches, a schedule per optimizer step, a reference policy: what could make a resumed
# run another one than the whole run.
OBJECTIVE = (
    *("actor.ppo_epochs=2", "actor.optim.lr_scheduler=inverse_sqrt", "actor.optim.lr_scheduler_unit=optimizer_step"),
    *("algorithm.kl.reward_coeff=0.01", "algorithm.entropy_coeff=0.001", "algorithm.rollout_correction.mode=truncate"),
)


def command(output_dir: Path, val_file: str, *overrides: str) -> list[str]:
    return [
        *(sys.executable, "-u", "-m", "dapo.main_ppo", "+experiment=dapo_tiny", f"trainer.output_dir={output_dir}"),
        *("data.train_batch_size=4", "actor.ppo_mini_batch_size=2", "rollout.n=4", "eval.n=1", "eval.every=2"),
        *("actor.max_tokens_per_gpu=256", "checkpoint.every=2", f"data.val_files=[{val_file}]", *OBJECTIVE, *overrides),
    ]


def run(output_dir: Path, val_file: str, *overrides: str) -> str:
    done = subprocess.run(command(output_dir, val_file, *overrides), capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(output_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl without what depends on timing."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(("perf/", "ledger/"))} for line in lines]


def checkpoint(output_dir: Path) -> Path:
    return output_dir / "checkpoints" / (output_dir / "checkpoints" / "LATEST").read_text().strip()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, val_file) -> tuple[Path, str]:
    """Two engines and two FSDP ranks."""
    output_dir = tmp_path_factory.mktemp("whole")
    return output_dir, run(output_dir, val_file, "trainer.total_steps=3", "rollout.num_engines=2")


def test_three_steps_report_evaluate_and_save(whole_run):
    output_dir, out = whole_run
    lines = metrics(output_dir)
    steps = [line for line in lines if "actor/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 2, 3]
    assert sum(line.startswith("step ") for line in out.splitlines()) == 3
    for line in steps:
        assert line["buffer/mixed"] == 4
        assert line["parity/max_abs_logprob_diff"] <= 1e-4
        assert line["actor/grad_norm"] > 0
        assert line["actor/optimizer_steps"] == 4
    penalties = [line["reward/kl_penalty"] for line in steps]
    assert abs(penalties[0]) <= 1e-6, "the policy is still the reference"
    assert max(penalties[1:]) < penalties[0]
    assert checkpoint(output_dir).name == "step_000003"
    assert list((output_dir / "tensorboard").iterdir())


def test_the_export_loads_and_differs_from_the_base(whole_run):
    directory = str(checkpoint(whole_run[0]) / "hf")
    trained = AutoModelForCausalLM.from_pretrained(directory)
    base = AutoModelForCausalLM.from_pretrained(resolve_path("pkg://dapo.tiny/base"))
    assert AutoTokenizer.from_pretrained(directory).chat_template
    changed = [not torch.equal(a, b) for a, b in zip(trained.parameters(), base.parameters(), strict=True)]
    assert all(changed)


def test_a_stopped_and_resumed_run_equals_the_whole_one(whole_run, tmp_path, val_file):
    """Also the same seed twice, and one engine where the whole run had two: neither may change a single bit."""
    output_dir = tmp_path / "parts"
    run(output_dir, val_file, "trainer.total_steps=2", "eval.after_train=true")
    assert metrics(output_dir) == [line for line in metrics(whole_run[0]) if line["step"] <= 2]
    out = run(output_dir, val_file, "trainer.total_steps=3")
    assert "resuming from" in out
    assert metrics(output_dir) == metrics(whole_run[0])
    first, second = (load_file(checkpoint(path) / "hf" / "model.safetensors") for path in (whole_run[0], output_dir))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def heed_ctrl_c() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C, and so would every process below these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(output_dir: Path, val_file: str) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A running program after its second step, and all processes below it."""
    process = subprocess.Popen(
        command(output_dir, val_file, "trainer.total_steps=1000", "eval.before_train=false", "checkpoint.every=0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )
    deadline = time.monotonic() + START_S
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            return process, psutil.Process(process.pid).children(recursive=True)
        assert time.monotonic() < deadline
    raise AssertionError(process.communicate()[1])


def finish(process: subprocess.Popen, children: list[psutil.Process]) -> tuple[int, str]:
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


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, id="Ctrl-C"), pytest.param(signal.SIGTERM, 85, id="SIGTERM")],
)
def test_a_signal_saves_what_was_trained(tmp_path, val_file, number, code):
    process, children = start(tmp_path / "run", val_file)
    os.kill(process.pid, number)
    returncode, err = finish(process, children)
    assert returncode == code, err
    assert checkpoint(tmp_path / "run").name >= "step_000002"


@pytest.mark.parametrize(
    ("name", "saved"),
    [pytest.param("EngineCore", True, id="engine"), pytest.param("ActorWorker", False, id="actor rank")],
)
def test_a_dead_worker_ends_the_run_with_one_message(tmp_path, val_file, name, saved):
    """What was trained is saved as long as all actor ranks live; a dead rank took its shards with it."""
    process, children = start(tmp_path / "run", val_file)
    victim = next(child for child in children if name in " ".join(child.cmdline()))
    victim.kill()
    returncode, err = finish(process, children)
    assert returncode == 1
    assert name[:5].lower() in err.lower()
    assert (tmp_path / "run" / "checkpoints" / "LATEST").exists() == saved
    assert saved or "could not be saved" in err
