"""The process of one program: reads the request from the job's socket, confines itself, runs the program. The program's
output goes to memory files that the server made. `ready` receives one byte when the program begins, or the reason why
it cannot. The request contains nothing that the program must not see."""

import atexit
import builtins
import fcntl
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import traceback
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from dapo.sandbox.confine import Place, confine
from dapo.sandbox.program import SOURCE_NAME, Confinement, read_frame

BEGUN = b"+"
MAX_WORDS = 500  # of the reason for a failed start
MAX_DESCRIPTORS = 1024  # of the server, which forks this process; bounds the descriptors to close
_RESULT, _READY, _FREE = 3, 4, 5  # descriptors after the three standard ones
_FAMILIAR_ALL = ("typing", "math", "collections", "itertools", "functools", "heapq", "bisect", "string")
_FAMILIAR = ("sys", "os", "re", "time", "random", "operator", "copy", "datetime", "decimal", "fractions", "statistics")


def become(way: Confinement, place: Place, channel: socket.socket, outputs: list[int], ready: int) -> NoReturn:
    """Runs the program received over `channel`. outputs: descriptors of standard output, standard error and result.
    ready: descriptor that reports the start."""
    try:
        request = read_frame(channel)
        _arrange([_file(request["stdin"]), *outputs, ready])
        ready = _READY
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        confine(way, place)
        _forget_the_server()
    except BaseException as error:  # the program must not run if any step fails
        os.write(ready, f"{type(error).__name__}: {error}".encode()[:MAX_WORDS])
        os._exit(1)
    os.write(_READY, BEGUN)
    os.close(_READY)
    status = 1
    try:
        status = _run(request)
    finally:  # always exit: returning would continue as the server
        os._exit(status)


def familiar_names() -> dict[str, Any]:
    """Returns names that solutions of exercises use without an import. Builtins are not replaced."""
    found: dict[str, Any] = {}
    for name in (*_FAMILIAR_ALL, *_FAMILIAR):
        module = importlib.import_module(name)
        if name in _FAMILIAR_ALL:
            public = getattr(module, "__all__", [word for word in dir(module) if not word.startswith("_")])
            found |= {word: getattr(module, word) for word in public if not hasattr(builtins, word)}
        found[name] = module
    if "numpy" in sys.modules:
        found["np"] = sys.modules["numpy"]
    return found


def _file(text: str) -> int:
    handle = os.memfd_create("stdin")
    with open(handle, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def _arrange(descriptors: list[int]) -> None:
    """Renumbers the descriptors from 0 on and closes all others."""
    above = [fcntl.fcntl(handle, fcntl.F_DUPFD, 2 * _FREE) for handle in descriptors]
    for number, handle in enumerate(above):
        os.dup2(handle, number)
    os.closerange(_FREE, MAX_DESCRIPTORS)


def _forget_the_server() -> None:
    atexit._clear()
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    sys.argv = [SOURCE_NAME]
    sys.dont_write_bytecode = True
    here = os.getcwd()
    os.environ.clear()
    os.environ.update({"HOME": here, "TMPDIR": here, "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"})
    for name in [name for name in sys.modules if name == "dapo" or name.startswith("dapo.")]:
        del sys.modules[name]
    tempfile.tempdir = None  # recomputed at next use
    random.seed(0)  # makes programs reproducible


class _Loader(importlib.abc.ExecutionLoader):
    def __init__(self, source: str) -> None:
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source

    def get_filename(self, fullname: str) -> str:
        return SOURCE_NAME


def _run(request: dict[str, Any]) -> int:
    status = 0
    try:
        value = _execute(request)
        if request["function"]:
            with open(_RESULT, "w", encoding="ascii") as result:
                json.dump(value, result, default=_plain)
    except BaseException as error:
        status = _status(error)
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        status = status or 1
    return status


def _execute(request: dict[str, Any]) -> Any:
    name = "program" if request["function"] else "__main__"
    loader = _Loader(request["source"])
    module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=SOURCE_NAME))
    if request["familiar"]:
        vars(module).update(_FAMILIAR_NAMES)
    sys.modules[name] = module
    loader.exec_module(module)
    return _function(module, request["function"])(*request["arguments"]) if request["function"] else None


def _function(module: ModuleType, name: str) -> Any:
    solution = getattr(module, "Solution", None)
    return getattr(module if solution is None else solution(), name)


def _plain(value: Any) -> Any:
    """Converts numpy values and iterables for JSON. Raises TypeError for other types."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, range | map | filter | zip) or type(value).__name__ in ("deque", "dict_keys", "dict_values"):
        return list(value)
    raise TypeError(f"the function returned a {type(value).__name__}, which JSON has no form for")


def _status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != SOURCE_NAME:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    return 1


_FAMILIAR_NAMES = familiar_names()
