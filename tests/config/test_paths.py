"""Paths of the configuration: what a run writes must last, and a name that is nearly right is found."""

from pathlib import Path

import pytest

from dapo.config.paths import output_path
from dapo.doctor import __main__ as doctor
from dapo.evaluate import __main__ as evaluate
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


def test_rays_copy_of_the_checkout_holds_no_run(job: Path) -> None:
    message = rf"`trainer.output_dir` \(outputs/a\) is {job}/outputs/a: .* trainer.output_dir=/shared/a$"
    with pytest.raises(ValueError, match=message):
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
    assert "`trainer.output_dir` (outputs/dapo_tiny) is" in capsys.readouterr().err
    assert [*job.iterdir()] == []
