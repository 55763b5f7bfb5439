"""Holds a directory for this process: the kernel's lock, and a lease for other hosts (`dapo.state.lease`).

In: a directory. Out: an open lock file and a lease, or an error that names the live run which has them.
"""

import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import TextIO

from dapo.state.lease import Lease, LeaseHeld

log = logging.getLogger(__name__)

LOCK, LEASE = ".lock", ".lease"


def hold(path: Path, where: str) -> tuple[TextIO, Lease]:
    """Takes lock and lease of a directory. where: the directory, for the ValueError that a live run raises."""
    lock, locked = _locked(path, where)
    lease = Lease(path / LEASE)
    try:
        lease.take(locked=locked)
    except BaseException as error:
        lock.close()
        if isinstance(error, LeaseHeld):
            raise ValueError(_in_use(where, str(error))) from error
        raise
    return lock, lease


def _in_use(where: str, holder: str) -> str:
    return f"{where} is in use by a live run ({holder}); wait for it, or give another `trainer.output_dir`"


def _locked(path: Path, where: str) -> tuple[TextIO, bool]:
    """Returns the lock file, locked by the kernel, which lets go when the process dies: there is no stale lock to
    remove. False: this file system has no locks."""
    lock, locked = (path / LOCK).open("a+", encoding="utf-8"), True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise ValueError(_in_use(where, holder)) from error
    except OSError as error:
        log.warning("%s cannot be locked by the kernel (%s); its lease alone keeps other runs away", path, error)
        locked = False
    lock.seek(0)
    lock.truncate()
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock, locked
