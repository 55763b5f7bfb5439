"""Holds a directory for this process: by the kernel's lock and, against runs on other hosts, which the lock may not
reach, by a lease, a file that its owner touches every few seconds. Clocks of hosts are not compared: to take over, a
process watches the lease by its own clock for as long as a live owner would leave it untouched."""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

log = logging.getLogger(__name__)

LOCK, LEASE = ".lock", ".lease"
BEAT_S = 5.0
STALE_S = 60.0  # a busy file system may delay a touch
POLL_S = 1.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # differs between hosts of one name, and after a restart of a host


def hold(path: Path, where: str) -> tuple[TextIO, "Lease"]:
    """Takes lock and lease of a directory. where: the directory, for the ValueError that a live run raises."""
    lock, lease = (path / LOCK).open("a+", encoding="utf-8"), Lease(path / LEASE)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel unlocks when the process dies
            if not os.fstat(lock.fileno()).st_nlink:  # its owner, which was refused, has just removed the directory
                raise LeaseHeld(_described({}))
        except BlockingIOError as error:
            raise LeaseHeld(_described(_owner(lease.path))) from error
        except OSError as error:
            log.warning("%s cannot be locked by the kernel (%s); its lease alone keeps other runs away", path, error)
        lease.take()
    except LeaseHeld as error:
        lock.close()
        raise ValueError(
            f"{where} is in use by a live run ({error}); wait for it, or give another `trainer.output_dir`"
        ) from error
    except BaseException:
        lock.close()
        raise
    return lock, lease


class LeaseHeld(Exception):
    """A live run holds the directory; the message names its process and host."""


class LeaseLost(RuntimeError):
    """Another run has taken the directory over, because this one did not touch the lease in time."""


class Lease:
    """Holds the file and touches it in its own thread, until `release` or until another run has taken it. Of two runs
    that take it at once, the first one finds at its next touch or check that it has lost it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token = secrets.token_hex(16)
        self._ended = threading.Event()
        self._lost = ""
        self._when_lost: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._beat, name="lease of the output directory", daemon=True)

    def take(self) -> None:
        """Takes the lease: at once if there is none, or if its owner was a process of this host that has ended.
        Otherwise watches the file for `STALE_S` seconds; raises LeaseHeld as soon as it changes."""
        owner = _owner(self.path)
        here = (owner.get("host"), owner.get("boot")) == (socket.gethostname(), _boot())
        if owner and not (here and not Path(f"/proc/{owner.get('pid')}").exists()):
            self._watch(owner)
        self._write()
        self._thread.start()

    def _watch(self, owner: dict[str, str]) -> None:
        seen, until = _touched(self.path), time.monotonic() + STALE_S
        log.warning(
            "%s holds %s; waiting at most %.0f s for a sign of life, then this run takes over; where that one has "
            "surely ended, remove %s and this one goes on at once",
            *(_described(owner), self.path.parent, STALE_S, self.path.name),
        )
        while time.monotonic() < until:
            time.sleep(POLL_S)
            now = _touched(self.path)
            if now is None:  # released
                return
            if now != seen:
                raise LeaseHeld(_described(_owner(self.path)))

    def check(self) -> None:
        if not self._lost and not self._ended.is_set():
            self._look()
        if self._lost:
            raise LeaseLost(self._lost)

    def when_lost(self, call: Callable[[], None]) -> None:
        """Calls `call`, in the lease's thread, once the lease is lost; at once if it is."""
        self._when_lost.append(call)
        if self._lost:
            call()

    def release(self) -> None:
        self._ended.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * BEAT_S)
        with contextlib.suppress(OSError):
            if _owner(self.path).get("token") == self._token:
                self.path.unlink()

    def _beat(self) -> None:
        while not self._lost and not self._ended.wait(BEAT_S):
            self._look()
        if self._lost:
            for call in self._when_lost:
                call()

    def _look(self) -> None:
        """Touches the file if it is ours, by its descriptor, so that one that has replaced it is left alone."""
        try:
            if not self.path.exists():  # somebody has removed it
                self._write()
            with self.path.open("rb") as file:
                owner = _parsed(file.read())
                if owner.get("token") == self._token:
                    os.utime(file.fileno())  # needs no space on a full disk
                elif owner:
                    by = _described(owner)
                    self._lost = f"{self.path.parent} was taken over by {by}; this run writes nothing any more"
        except OSError as error:
            log.warning("%s cannot be touched (%s); another host may take the directory over", self.path, error)

    def _write(self) -> None:
        temporary = self.path.with_name(f"{self.path.name}.{self._token}")
        about = {"host": socket.gethostname(), "boot": _boot(), "pid": str(os.getpid()), "token": self._token}
        about["since"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        temporary.write_text(json.dumps(about) + "\n", encoding="utf-8")
        temporary.replace(self.path)


def _touched(path: Path) -> int | None:
    """Returns the time of the file, None without one. Opening it makes a network file system ask its server."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _owner(path: Path) -> dict[str, str]:
    try:
        return _parsed(path.read_bytes())
    except FileNotFoundError:
        return {}


def _parsed(content: bytes) -> dict[str, str]:
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError):
        return {}


def _described(owner: dict[str, str]) -> str:
    if not owner:
        return "an unknown run"
    return f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"


def _boot() -> str:
    return BOOT_ID.read_text(encoding="utf-8").strip() if BOOT_ID.exists() else ""
