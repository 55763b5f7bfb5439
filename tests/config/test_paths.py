"""Paths of the configuration: what a run writes must last, and a name that is nearly right is found."""

import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from dapo.config.compose import compose
from dapo.config.paths import checked_path, not_on_hub, output_path, resolve_path
from dapo.tools import evaluate
from dapo.tools.doctor import __main__ as doctor
from tests.support.state.claims import claim

JOB = "session_2026-01-01/runtime_resources/working_dir_files/_ray_pkg_0123"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands where a Ray job starts."""
    folder = tmp_path / JOB
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_a_run_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_path("outputs/a") == tmp_path / "outputs/a"
    assert output_path("/shared/working_dir_files/a") == Path("/shared/working_dir_files/a")


@pytest.mark.parametrize(
    "value", ["s3://bucket/run", "hdfs://name:9000/run", "file:///run", "s3:/bucket/run", "pkg://a/b"]
)
def test_an_address_of_other_storage_is_no_folder_here(value: str) -> None:
    with pytest.raises(ValueError, match=rf"^`trainer.output_dir` \({value}\) is no local path.*mounted on every node"):
        output_path(value)
    if not value.startswith("pkg"):
        with pytest.raises(ValueError, match=rf"^`model.path` \({value}\) is no local path"):
            checked_path(value, key="model.path")


def test_rays_copy_of_the_checkout_holds_no_run(job: Path) -> None:
    with pytest.raises(ValueError, match=rf"\(outputs/a\) is {job}/outputs/a: .* trainer.output_dir=/shared/a$"):
        output_path("outputs/a")
    with pytest.raises(ValueError, match="goes with the cluster"):
        output_path(str(job / "outputs"))
    assert output_path("/shared/a") == Path("/shared/a")
    with pytest.raises(ValueError, match="goes with the cluster"):
        claim(Path("outputs/a"))
    assert [*job.iterdir()] == []


def test_the_doctor_and_an_evaluation_say_so_too(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dapo.doctor", "+experiment=dapo_tiny"])
    with pytest.raises(SystemExit):
        doctor.main()
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("fault    configuration    `trainer.output_dir` (outputs/dapo_tiny) is")
    monkeypatch.setattr("sys.argv", ["dapo.evaluate", "+experiment=dapo_tiny"])
    with pytest.raises(SystemExit):
        evaluate.main()
    assert "(outputs/evaluations/pkg-dapo.tiny-base) is" in capsys.readouterr().err
    assert [*job.iterdir()] == []


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        pytest.param("run/checkpoints/step_100/hf", "run/checkpoints/step_000100/hf", id="folder"),
        pytest.param("run/checkpoints/step_10/hf/", "run/checkpoints/step_000010/hf", id="not one with more zeros"),
        pytest.param("./step_10", "./step_000010", id="last part"),
        pytest.param("run/checkpiont/step_000010", "run/checkpoints/step_000010", id="misspelt folder"),
        pytest.param("run/checkpoints/newest/hf", "", id="nothing near"),
        pytest.param("run/checkpoints/step_100/fh", "", id="file that the folder lacks"),
    ],
)
def test_a_step_is_found_by_its_number(value: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (100, 10, 110):
        (tmp_path / f"run/checkpoints/step_{step:06d}/hf").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run/checkpoints" if value.startswith(".") else tmp_path)
    with pytest.raises(ValueError) as error:
        checked_path(value, key="model.path")
    assert str(error.value).endswith(f"; did you mean {meant}?" if meant else "; give an existing path")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        pytest.param("Qwen/Nope", r": not whole in .*HF_HUB_OFFLINE is set; `hf download Qwen/Nope` on", id="hub"),
        pytest.param("nope", r": no such directory in /.*, and not whole in the hub's cache", id="no directory"),
        pytest.param("{folder}", r": no tokenizer: .*; copy or download the model again", id="damaged"),
    ],
)
def test_a_model_whose_tokenizer_cannot_be_read_is_named(path: str, said: str, tmp_path: Path) -> None:
    from dapo.driver.run import load_data

    folder = shutil.copytree(resolve_path("pkg://dapo.tiny/base"), tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    cfg = compose([f"model.path={path.format(folder=folder)}"], "dapo_tiny")
    with pytest.raises(ValueError, match=rf"^`model.path` \({re.escape(cfg.model.path)}\){said}"):
        load_data(cfg)


def test_where_there_is_a_network_the_hubs_own_words_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    found, remedy = not_on_hub("model.path", "a/b", OSError("\n401 it is gated\nmore"))
    assert found == "`model.path` (a/b): OSError: 401 it is gated" and "HF_TOKEN" in remedy
    assert not_on_hub("model.path", "b", OSError(""))[0].endswith(", and OSError: no message")


def test_paths_resolve_or_stay_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert resolve_path("model") == str(tmp_path / "model")
    assert resolve_path("pkg://dapo/types.py") == str(Path(resolve_path("pkg://dapo/pools.py")).with_name("types.py"))
    assert Path(resolve_path("pkg://dapo/types.py")).is_absolute()
    for name in ("gpt2", "Qwen/Qwen2.5-32B", "open-r1/DAPO-Math-17k-Processed:train"):
        assert checked_path(name, key="model.path") == name


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param("data/trian.parquet", "did you mean data/train.parquet", id="file-misspelt"),
        pytest.param("./other.jsonl", "give an existing path", id="nothing-near"),
        pytest.param("nowhere/a.jsonl", "nor does its folder .*/nowhere", id="no-folder"),
        pytest.param("runs/a/checkpoints", "nor does its folder", id="two-slashes"),
        pytest.param("/nowhere/model", "nor does its folder /nowhere", id="absolute"),
        pytest.param("~/no-such-model-here", "does not exist in", id="home"),
        pytest.param("pkg://dapo/type.py", "did you mean pkg://dapo/types.py", id="package-file"),
        pytest.param("pkg://dapoo/types.py", "the package is not installed", id="package"),
    ],
)
def test_a_path_that_does_not_exist(value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").touch()
    with pytest.raises(ValueError, match=message) as error:
        checked_path(value, key="model.path")
    assert f"`model.path` ({value})" in str(error.value)
