"""Which GPUs a process may use, by a stand-in for nvidia-smi, and which limits of control groups count for it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from dapo.config.compose import compose
from dapo.tools.doctor import inputs, limits
from dapo.tools.doctor.checks import CHECKS, diagnose
from dapo.tools.doctor.machines import ThisMachine
from dapo.tools.doctor.software import visible_gpus
from dapo.tools.doctor.subject import FAULT, OK, Subject

MIB = 2**20
MIXED = [("A10", "GPU-aaaa-1", 24_000, 11), ("H100", "GPU-bbbb-2", 80_000, 5_000), ("A10", "GPU-aacc-3", 24_000, 13)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Describes this machine's GPUs, and what CUDA_VISIBLE_DEVICES says."""

    def give(gpus: list[tuple], visible: str | None) -> None:
        lines = [f"{number}, {uuid}, {name}, {total}, {used}" for number, (name, uuid, total, used) in enumerate(gpus)]
        (tmp_path / "list").write_text("\n".join(lines))
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nexec cat {tmp_path}/list\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return give


@pytest.mark.parametrize(
    ("gpus", "visible", "totals"),
    [
        (MIXED, None, [24_000, 80_000, 24_000]),
        (MIXED, "1", [80_000]),
        (MIXED, " 2, 1", [24_000, 80_000]),
        (MIXED, "GPU-bbbb", [80_000]),
        (MIXED, "1,-1,0", [80_000]),
        (MIXED, "1,9,0", [80_000]),
        (MIXED, "1,GPU-none,0", [80_000]),
        (MIXED, "", []),
        (MIXED, "NoDevFiles", []),
    ],
)
def test_the_gpus_that_cuda_visible_devices_names_are_those_that_count(machine, gpus, visible, totals):
    """The first n of nvidia-smi are others, and CUDA stops at the first name that it does not know."""
    machine(gpus, visible)
    assert [gpu.total / MIB for gpu in visible_gpus()] == totals
    assert ThisMachine().gpus() == len(totals)


@pytest.mark.parametrize("told", ["[N/A]", "[Not Supported]"])
def test_a_gpu_without_memory_of_its_own_is_one(machine, told):
    """It shares the machine's, of which nvidia-smi tells nothing: NVIDIA GB10."""
    unified = ("NVIDIA GB10", "GPU-cccc-5", told, told)
    machine([unified, *MIXED], None)
    assert [gpu.total for gpu in visible_gpus()] == [None, 24_000 * MIB, 80_000 * MIB, 24_000 * MIB]
    subject = Subject(compose(["+experiment=dapo_qwen7b", "trainer.device=cuda"], plan=True))
    assert "with 25.17 GB" in inputs.plan(subject).found, "the smallest that is known"
    machine([unified], None)
    assert ThisMachine().gpus() == 1 and "80.00 GB" in inputs.plan(subject).found
    [outcome] = diagnose(subject, ThisMachine(), [check for check in CHECKS if check.name == "GPUs"])
    assert "1 x NVIDIA GB10, memory not told" in outcome.finding.found


def test_a_slice_of_a_gpu_counts_as_one(machine):
    machine(MIXED, "MIG-1111-a,MIG-2222-b")
    assert [gpu.total for gpu in visible_gpus()] == [None, None]


def test_what_is_told_of_gpus_is_told_of_those_that_are_visible(machine):
    look = [check for check in CHECKS if check.name == "GPUs"]
    subject = Subject(compose(["+experiment=dapo_qwen7b", "trainer.device=cuda"], plan=True))
    for visible, told in (("1", "1 x H100, 83.89 GB"), ("7", "no GPU (CUDA_VISIBLE_DEVICES: 7)")):
        machine(MIXED, visible)
        [outcome] = diagnose(subject, ThisMachine(), look)
        assert told in outcome.finding.found


def test_the_memory_of_the_host_is_compared_where_the_gpus_are(machine, monkeypatch):
    """What is offloaded ends a run without room for it."""
    memory = SimpleNamespace(total=250e9)
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(limits, "cgroup", lambda name: None)
    subject = Subject(compose(["+experiment=dapo_qwen7b_hybrid"], plan=True))
    machine([("H100", f"GPU-{number}", 81_559, 0) for number in range(8)], None)
    assert inputs.plan(subject).level == OK
    subject.cfg.actor.offload = "host"
    memory.total = 100e9
    found = inputs.plan(subject)
    assert found.level == FAULT and "`plan.host_memory_bytes` is 100.00 GB" in found.found, found
    machine([], None)
    assert inputs.plan(subject).level == OK, "the head may have none of the GPUs, and less memory"


@pytest.mark.parametrize(
    ("own", "files", "memory", "processes"),
    [
        pytest.param("0::/a/b\n", {"a/memory.max": "300", "a/b/memory.max": "max"}, 300, None, id="second version"),
        pytest.param("0::/a/b\n", {"a/pids.max": "70", "a/b/pids.max": "max"}, 1000, 70, id="processes"),
        pytest.param("", {}, 1000, None, id="none"),
    ],
)
def test_the_smallest_limit_of_all_control_groups_around_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], memory: int, processes: int | None
) -> None:
    """own: what /proc/self/cgroup says; files: below /sys/fs/cgroup."""
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / name).write_text(text + "\n")
    monkeypatch.setattr(limits, "CGROUPS", tmp_path / "sys")
    monkeypatch.setattr(limits, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: SimpleNamespace(total=1000))
    assert (limits.memory_bytes(), limits.cgroup("pids.max")) == (memory, processes)
