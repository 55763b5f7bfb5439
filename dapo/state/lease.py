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
SETTLE_S = 2.0  # in which two that take over at once see who was last
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def hold(path: Path, where: str) -> tuple[TextIO, "Lease"]:
    """Takes lock and lease of a directory. where: the directory, for the ValueError that a live run raises."""
    lock, locked = (path / LOCK).open("a+", encoding="utf-8"), True
    lease = Lease(path / LEASE)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel unlocks when the process dies
        except BlockingIOError as error:
            lock.seek(0)
            raise LeaseHeld(lock.read().strip() or "another process") from error
        except OSError as error:
            log.warning("%s cannot be locked by the kernel (%s); its lease alone keeps other runs away", path, error)
            locked = False
        lock.seek(0)
        lock.truncate()
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        lease.take(locked=locked)
    except BaseException as error:
        lock.close()
        if isinstance(error, LeaseHeld):
            raise ValueError(
                f"{where} is in use by a live run ({error}); wait for it, or give another `trainer.output_dir`"
            ) from error
        raise
    return lock, lease


class LeaseHeld(Exception):
    """A live run holds the directory; the message names its process and host."""


class LeaseLost(RuntimeError):
    """Another run has taken the directory over, because this one did not touch the lease in time."""


class Lease:
    """Holds the file and touches it in its own thread, until `release` or until another run has taken it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = secrets.token_hex(16)
        self._ended = threading.Event()
        self._lost = ""
        self._when_lost: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._beat, name="lease of the output directory", daemon=True)

    def take(self, *, locked: bool) -> None:
        """Takes the lease: at once if there is none, or if its owner is known to be dead.

        Otherwise watches the file for at most `STALE_S` seconds; raises LeaseHeld as soon as it changes. locked: this
        process holds the kernel's lock, so that no other on this host takes over at the same time. (It does not prove
        that the owner has ended: the lock file of a live run may have been removed.)
        """
        if not self._created():
            owner = _owner(self._path)
            if not _is_here(owner) or _is_alive(owner):
                self._watch(owner)
            self._write()
            if not (_is_here(owner) and locked):
                time.sleep(SETTLE_S)
            if _owner(self._path).get("token") != self._token:
                raise LeaseHeld(_described(_owner(self._path)))
        self._thread.start()

    def _watch(self, owner: dict[str, str]) -> None:
        seen, until = _state(self._path), time.monotonic() + STALE_S
        log.warning(
            "%s holds %s; waiting at most %.0f s for a sign of life, then this run takes over; where that one has "
            "surely ended, remove %s and this one goes on at once",
            *(_described(owner), self._path.parent, STALE_S, self._path.name),
        )
        while time.monotonic() < until:
            time.sleep(POLL_S)
            now = _state(self._path)
            if now is None:  # released
                return
            if now != seen:
                raise LeaseHeld(_described(_owner(self._path)))

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
            if _owner(self._path).get("token") == self._token:
                self._path.unlink()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._look()
            if self._lost:
                for call in self._when_lost:
                    call()
                return

    def _look(self) -> None:
        """Touches the file if it is ours, by its descriptor, so that one that has replaced it is left alone."""
        try:
            try:
                with self._path.open("rb") as file:
                    owner = _parsed(file.read())
                    if owner.get("token") == self._token:
                        os.utime(file.fileno())  # needs no space on a full disk
                if not owner:  # emptied or damaged: another run would have put a complete file in its place
                    self._write()
                    return
            except FileNotFoundError:
                owner = {"token": self._token} if self._created() else _owner(self._path)
        except OSError as error:
            log.warning("%s cannot be touched (%s); another host may take the directory over", self._path, error)
            return
        if owner.get("token") != self._token:
            self._lost = f"{self._path.parent} was taken over by {_described(owner)}; this run writes nothing any more"

    def _created(self) -> bool:
        """Writes the file if there is none."""
        try:
            self._write(os.link)  # atomic on the server of a network file system
        except (FileExistsError, FileNotFoundError):  # the second: the directory itself was removed
            return False
        except OSError:  # a file system without hard links
            if self._path.exists():
                return False
            self._write()
        return True

    def _write(self, move: Callable[[Path, Path], object] = os.replace) -> None:
        temporary = self._path.with_name(f"{self._path.name}.{self._token}")
        pid = str(os.getpid())
        about = {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "token": self._token}
        about |= {"started": _started(pid), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        try:
            temporary.write_text(json.dumps(about) + "\n", encoding="utf-8")
            move(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)


def _state(path: Path) -> tuple[bytes, int] | None:
    """Returns content and time of the file, None without one. Opening it makes a network file system ask its server."""
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _owner(path: Path) -> dict[str, str]:
    state = _state(path)
    return {} if state is None else _parsed(state[0])


def _parsed(content: bytes) -> dict[str, str]:
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in owner.items()} if isinstance(owner, dict) else {}


def _described(owner: dict[str, str]) -> str:
    if not owner:
        return "an unknown run"
    return f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"


def _is_here(owner: dict[str, str]) -> bool:
    return (owner.get("host"), owner.get("boot")) == (socket.gethostname(), _boot())


def _is_alive(owner: dict[str, str]) -> bool:
    """Compares start times too: the process id may have been reused."""
    started = _started(owner.get("pid", ""))
    return started != "" and owner.get("started", started) == started


def _started(pid: str) -> str:
    """Returns when a process of this host started, in clock ticks since boot (proc(5)); "" if it has ended."""
    try:
        text = Path(f"/proc/{int(pid)}/stat").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""
    state, *fields = text.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]  # a zombie has ended


def _boot() -> str:
    """Returns the boot id, which differs between hosts of one name, and after a restart of a host."""
    try:
        return BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
