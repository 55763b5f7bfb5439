"""Moves the calling process into its own file system, by a mount namespace, for kernels without Landlock. The new root
shows the given paths read-only and an empty directory of limited size. Raises OSError if the kernel or the container
allows no namespace. Root needs CAP_SYS_ADMIN; other users create a user namespace first."""

import os
from collections.abc import Sequence

from dapo.config.reward import SandboxConfig
from dapo.sandbox import kernel

FOLDER = "/box"
_READ_ONLY, _NO_SUID, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 32, 4096, 1 << 14, 1 << 18
# statvfs flags that a mount in a user namespace must keep, and their mount(2) values.
_KEPT = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}


def enter(folder: str, readable: Sequence[str], limits: SandboxConfig) -> None:
    """Makes `folder` the root directory and `FOLDER` in it the working directory."""
    _leave_the_namespaces()
    kernel.mount("", "/", flags=_RECURSIVE | _PRIVATE)
    size = (limits.files + 1) * limits.output_bytes
    kernel.mount("tmpfs", folder, "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,mode=755")
    for path in readable:
        _show(path, folder)
    box = f"{folder}{FOLDER}"
    os.mkdir(box)
    kernel.mount("tmpfs", box, "tmpfs", _NO_SUID | _NO_DEVICES, f"size={size},nr_inodes={limits.files + 2},mode=1777")
    kernel.mount("", folder, flags=_REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)
    os.chroot(folder)
    os.chdir(FOLDER)


def _leave_the_namespaces() -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        kernel.unshare(kernel.NEW_MOUNTS)
    except PermissionError:
        kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNTS)
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)


def _show(path: str, folder: str) -> None:
    """Binds a path read-only at the same place below `folder`; a symbolic link stays a link."""
    target = f"{folder}{path}"
    if os.path.lexists(target):
        return  # inside an earlier path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    kernel.mount(path, target, flags=_BIND | _RECURSIVE)
    flags = os.statvfs(path).f_flag
    kept = sum(flag for given, flag in _KEPT.items() if flags & given)
    kernel.mount("", target, flags=_REMOUNT | _BIND | _READ_ONLY | kept)
