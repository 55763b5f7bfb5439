"""Which limits of a container's control groups count, of the kernel's first version and of its second."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from dapo.doctor.checked import limits

UNLIMITED = "9223372036854771712"  # as the first version writes it


def groups(folder: Path, patch: pytest.MonkeyPatch, own: str, files: dict[str, str]) -> None:
    """own: what /proc/self/cgroup says; files: below /sys/fs/cgroup."""
    (folder / "own").write_text(own)
    for name, text in files.items():
        (folder / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "sys" / name).write_text(text + "\n")
    patch.setattr(limits, "CGROUPS", folder / "sys")
    patch.setattr(limits, "OWN_CGROUPS", folder / "own")
    patch.setattr(limits.psutil, "virtual_memory", lambda: SimpleNamespace(total=1000))


FIRST = "5:cpu,cpuacct:/job/step\n4:pids:/job/step\n3:memory:/job/step\n1:name=systemd:/\n"


@pytest.mark.parametrize(
    ("own", "files", "memory", "processes"),
    [
        pytest.param("0::/a/b\n", {"a/memory.max": "300", "a/b/memory.max": "max"}, 300, None, id="second version"),
        pytest.param(
            FIRST,
            {
                "memory/memory.limit_in_bytes": UNLIMITED,
                "memory/job/memory.limit_in_bytes": "400",
                "memory/job/step/memory.limit_in_bytes": "500",
                "pids/job/pids.max": "70",
                "pids/job/step/pids.max": "max",
            },
            400,
            70,
            id="first version",
        ),
        pytest.param(FIRST, {"memory/memory.limit_in_bytes": "600"}, 600, None, id="first version, in a container"),
        pytest.param(
            FIRST + "0::/\n", {"memory/memory.limit_in_bytes": UNLIMITED, "cpu/memory.max": "7"}, 1000, None, id="both"
        ),
        pytest.param("", {}, 1000, None, id="none"),
    ],
)
def test_the_smallest_limit_of_all_groups_around_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], memory: int, processes: int | None
) -> None:
    groups(tmp_path, monkeypatch, own, files)
    assert (limits.memory_bytes(), limits.cgroup("pids.max")) == (memory, processes)
