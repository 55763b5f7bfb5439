"""How `launch/test.sh` deals files to two processes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.dealing import GROUPS, ORDER, GroupedFiles, long_ones_first

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("file", ORDER)
def test_a_file_that_goes_first_is_there_and_starts_processes(file: str) -> None:
    assert "mark.ray" in (ROOT / file).read_text()


def test_a_group_is_the_work_of_one_process() -> None:
    config = SimpleNamespace(option=SimpleNamespace(loadscopereorder=True), getvalue=lambda name: ["popen"] * 2)
    scheduler = GroupedFiles(config)
    for name, files in GROUPS.items():
        assert {scheduler._split_scope(f"{file}::test_a[1::2]") for file in files} == {name}
    assert scheduler._split_scope("tests/test_loss.py::test_a") == "tests/test_loss.py"
    assert not config.option.loadscopereorder


def item(nodeid: str, marker: str) -> SimpleNamespace:
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: name == marker)


def test_plain_files_go_last_and_files_stay_whole() -> None:
    ids = ["tests/test_loss.py::c", "tests/x.py::b", "tests/x.py::a ray", f"{ORDER[-1]}::a", f"{ORDER[0]}::a ray"]
    found = long_ones_first([item(each, "ray" if each.endswith(" ray") else "") for each in ids])
    assert [each.nodeid for each in found] == [ids[4], ids[3], ids[1], ids[2], ids[0]]
