"""`python -m dapo.evaluate`: the real program on an export made here, and what it refuses before anything starts."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import pyarrow.parquet as pq
import pytest

from dapo.config.paths import resolve_path
from dapo.evaluation.held_out import Answered
from dapo.ground.console import EXIT_INTERRUPTED
from dapo.ground.signals import caught
from dapo.tools import evaluate as command
from tests.support.fakes import make_group
from tests.support.runs import START_S

VAL = "pkg://dapo.tiny/data/val.parquet"
# The tiny model has positions for these, and not for the default ones.
LENGTHS = ("data.max_prompt_length=64", "data.max_response_length=128", "reward.overlong_buffer.len=32")


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """A Hugging Face directory as any training leaves it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, folder = resolve_path("pkg://dapo.tiny/base"), tmp_path_factory.mktemp("model") / "export"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def line_of(export, *more):
    return [f"model.path={export}", f"data.val_files=[{VAL}]", *LENGTHS, *more]


@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_a_checkpoint_is_evaluated_without_actors(ray_cluster, export, tmp_path):
    """Two sets, one of which repeats its problems."""
    from tests.support.cluster import join_cluster

    rows = pq.read_table(resolve_path(VAL)).slice(0, 12)
    pq.write_table(rows, tmp_path / "sums.parquet")
    pq.write_table(rows.slice(0, 3).take([0, 1, 2, 2, 1, 0, 0, 1, 2]), tmp_path / "copies.parquet")
    sets = f"data.val_files={{sums: {tmp_path}/sums.parquet, copies: [{tmp_path}/copies.parquet]}}"
    given = (
        sets,
        "eval.n=2",
        "eval.top_p=1.0",
        *LENGTHS,
        "model.dtype=float32",
        "reward.num_workers=1",
        join_cluster(),
    )
    line = [sys.executable, "-u", "-m", "dapo.evaluate", f"model.path={export}", *given]
    done = subprocess.run(
        [*line, f"trainer.output_dir={tmp_path / 'out'}"], capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "data.val_files.copies: 9 rows, 6 duplicates" in out and "data.train_files" not in out
    assert "sums: 12 problems x 2 samples, avg@2 0." in out and "copies: 3 problems x 3 samples, avg@3" in out
    assert "| k | pass@k | maj@k | best@k |" in out
    assert "33/33" in done.stderr, "progress to its end"
    written = json.loads((tmp_path / "out" / "evaluation_001.json").read_text())
    assert f"written to {tmp_path / 'out' / 'evaluation_001.json'}" in out
    files = {f"data.val_files.{name}[0]": f"{tmp_path}/{name}.parquet" for name in ("sums", "copies")}
    assert {key: text.partition(" (")[0] for key, text in written["inputs"].items()} == {
        "model.path": str(export),
        **files,
    }
    assert (written["model"], written["sampling"]["n"], written["sampling"]["top_p"]) == (str(export), 2, 1.0)
    assert [(one["name"], one["problems"], one["answers"]) for one in written["summaries"]] == [
        ("sums", 12, 24),
        ("copies", 3, 9),
    ]
    sums = [one for one in written["problems"] if one["set"] == "sums"]
    accuracies = [accuracy for one in sums for accuracy in one["accuracy"]]
    assert written["summaries"][0]["estimates"]["avg@2"]["value"] == pytest.approx(sum(accuracies) / 24)
    assert 0 < sum(accuracies) < 24 and all(tokens > 0 for one in sums for tokens in one["tokens"])
    right = [a == t for one in sums for a, t in zip(one["answer"], [one["ground_truth"]] * 2, strict=True)]
    assert [bool(accuracy) for accuracy in accuracies] == right


def test_a_signal_ends_it_in_order(export, tmp_path, monkeypatch, capsys):
    """Engines that outlive it would hold the GPUs."""
    ended = []

    async def place(cfg, device):
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(5)
        finally:
            ended.append("placement")

    @contextmanager
    def cluster(cfg):
        for each in caught():
            signal.signal(each, lambda *_: None)  # as Ray does with one of them
        try:
            yield
        finally:
            ended.append("Ray")

    monkeypatch.setattr("dapo.driver.run.ray_cluster", cluster)
    monkeypatch.setattr("dapo.driver.fleet.place", place)
    monkeypatch.setattr(sys, "argv", ["dapo.evaluate", *line_of(export, f"trainer.output_dir={tmp_path / 'out'}")])
    before = {each: signal.getsignal(each) for each in caught()}
    try:
        with pytest.raises(SystemExit) as end:
            command.main()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert end.value.code == EXIT_INTERRUPTED and ended == ["placement", "Ray"]
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert not [*(tmp_path / "out").glob("evaluation_*.json")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.path=/nowhere/x"], "`model.path` (/nowhere/x) does not exist"),
        (["model.path=Qwen/Nope"], "`model.path` (Qwen/Nope): not whole in the hub's cache ("),
        (["data.val_files=[]"], "`data.val_files` is empty; give"),
        (["data.val_files=[no.parquet]"], "(no.parquet) does not exist"),
        (["eval.m=3"], "unknown key `eval.m`"),
        (["data.max_response_length=8192"], "(64 + 8192 = 8256) must be at most"),
        (["eval.n=0"], "`eval.n` (0) must be 1 to 1000"),
        (["reward.functions=[{{path: no}}]"], "`reward.functions[0]"),
        (["trainer.output_dir={export}/config.json"], "config.json"),
        (["rollout.vllm.load_format=dummy"], "`rollout.vllm.load_format` (dummy) gives engines random weights"),
    ],
)
def test_a_mistake_ends_with_one_message_before_anything_starts(arguments, message, export, monkeypatch, capsys):
    def started(cfg):
        raise AssertionError("Ray starts")

    monkeypatch.setattr("dapo.driver.run.ray_cluster", started)
    given = line_of(export, *(argument.format(export=export) for argument in arguments))
    monkeypatch.setattr(sys, "argv", ["dapo.evaluate", *given])
    with pytest.raises(SystemExit) as ended:
        command.main()
    err = capsys.readouterr().err
    assert ended.value.code == 1 and message in err and "Traceback" not in err
    assert not [*export.parent.glob("*-evaluations")], "no folder stays behind"


def test_nothing_is_asked_for_actors(export, monkeypatch):
    from dapo.driver import fleet, run

    placed = []

    def place(cfg, device, **how):
        placed.append((cfg.actor.num_workers, cfg.trainer.colocate))
        raise RuntimeError("far enough")

    monkeypatch.setattr(run, "ray_cluster", lambda cfg: nullcontext())
    monkeypatch.setattr(fleet, "Placement", place)
    line = line_of(export, "trainer.colocate=time", "trainer.device=cpu")
    with pytest.raises(RuntimeError, match="far enough"):
        asyncio.run(run.evaluate(command.configuration(line)))
    assert placed == [(0, "none")]


def test_a_model_that_actors_cannot_train_can_be_evaluated(export, tmp_path):
    """A mixture of experts, and weights that are no safetensors, which an engine reads where it is told to."""
    experts = shutil.copytree(export, tmp_path / "experts")
    config = json.loads((experts / "config.json").read_text())
    (experts / "config.json").write_text(json.dumps(config | {"num_experts": 8}))
    (experts / "model.safetensors").rename(experts / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no model.safetensors, .* or set `rollout.vllm.load_format=hf`"):
        command.configuration(line_of(experts))
    cfg = command.configuration(line_of(experts, "rollout.vllm.load_format=hf"))
    assert cfg.model.path == str(experts)


def test_results_lie_beside_their_model(export, tmp_path, monkeypatch):
    """In no other run's directory, whatever the experiment."""
    run = tmp_path / "outputs" / "other"
    for folder in (run / "checkpoints" / "step_000007" / "hf", tmp_path / "models" / "mine"):
        shutil.copytree(export, folder)
    (run / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)

    def found(path, *more):
        given = line_of(path, *more)
        return str(command.folder_of(command.configuration(given), given).relative_to(tmp_path))

    assert found("outputs/other/checkpoints/step_000007/hf") == "outputs/other"
    assert found("models/mine", "+experiment=dapo_tiny") == "models/mine-evaluations"
    assert found("models/mine", f"trainer.output_dir={tmp_path}/x") == "x"
    assert found("pkg://dapo.tiny/base", "rollout.n=8") == "outputs/evaluations/pkg-dapo.tiny-base"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert found(run / "checkpoints" / "step_000007" / "hf").startswith("outputs/evaluations/")


def test_no_evaluation_overwrites_another(tmp_path, export):
    cfg = command.configuration(line_of(export, "data.chat_template_kwargs.enable_thinking=false"))
    answered = Answered(version=0, sets={"": (make_group(0, [1.0, 0.0]),)})
    paths = [command.write(tmp_path, cfg, answered) for _ in range(2)]
    assert [path.name for path in paths] == ["evaluation_001.json", "evaluation_002.json"]
    assert json.loads(paths[0].read_text())["chat_template_kwargs"] == {"enable_thinking": False}
