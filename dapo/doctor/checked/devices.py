"""Lists a node's GPUs, or the slices of a GPU in MIG mode, and those visible to this process. Uses only nvidia-smi and
CUDA_VISIBLE_DEVICES: no GPU is touched, and torch is not imported."""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

SMI_S = 30.0
NOT_TOLD = ("N/A", "Not Supported")
VISIBLE = "CUDA_VISIBLE_DEVICES"


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
