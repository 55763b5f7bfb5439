"""Becomes the process of one program: reads it, confines itself, runs it.

In: a request as a frame over the job's socket. Out: what the program writes, in files of memory that the server made;
one byte when it is confined and begins, or words that say why it cannot. The request holds nothing that the program
must not see.
"""

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
from dapo.sandbox.frames import read_frame
from dapo.sandbox.program import SOURCE_NAME, Confinement

BEGUN = b"+"
MAX_WORDS = 500  # of why it cannot begin
MAX_DESCRIPTORS = 1024  # of the server, which forks this process
_RESULT, _READY, _FREE = 3, 4, 5  # descriptors behind the three of every program
_FAMILIAR_ALL = ("typing", "math", "collections", "itertools", "functools", "heapq", "bisect", "string")
_FAMILIAR = ("sys", "os", "re", "time", "random", "operator", "copy", "datetime", "decimal", "fractions", "statistics")


def become(way: Confinement, place: Place, channel: socket.socket, outputs: list[int], ready: int) -> NoReturn:
    """Runs the program that comes over `channel`. outputs: descriptors of standard output, standard error and result.
    ready: the one that says how it begins."""
    try:
        request = read_frame(channel)
        _arrange([_file(request["stdin"]), *outputs, ready])
        ready = _READY
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        confine(way, place)
        _forget_the_server()
    except BaseException as error:  # no step may fail and the program run nevertheless
        os.write(ready, f"{type(error).__name__}: {error}".encode()[:MAX_WORDS])
        os._exit(1)
    os.write(_READY, BEGUN)
    os.close(_READY)
    status = 1
    try:
        status = _run(request)
    finally:  # whatever it raises: beyond this function the process would go on as the server
        os._exit(status)


def familiar_names() -> dict[str, Any]:
    """Returns names that answers to exercises take for granted; no builtin is hidden."""
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
    """Returns the descriptor of a file in memory that holds a text."""
    handle = os.memfd_create("stdin")
    with open(handle, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def _arrange(descriptors: list[int]) -> None:
    """Gives the descriptors the numbers from 0 on, and closes all others."""
    above = [fcntl.fcntl(handle, fcntl.F_DUPFD, 2 * _FREE) for handle in descriptors]
    for number, handle in enumerate(above):
        os.dup2(handle, number)
    os.closerange(_FREE, MAX_DESCRIPTORS)


def _forget_the_server() -> None:
    """Makes this interpreter look like one that was started for the program."""
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
    tempfile.tempdir = None  # it is asked for anew
    random.seed(0)  # the same program, the same outcome


class _Loader(importlib.abc.ExecutionLoader):
    """Gives the program's text to Python's own machinery of imports, and to its tracebacks."""

    def __init__(self, source: str) -> None:
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source

    def get_filename(self, fullname: str) -> str:
        return SOURCE_NAME


def _run(request: dict[str, Any]) -> int:
    """Returns the exit status that Python would end with."""
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
    """Returns the function of that name, or the method of a new `Solution`."""
    solution = getattr(module, "Solution", None)
    return getattr(module if solution is None else solution(), name)


def _plain(value: Any) -> Any:
    """Returns numpy's values as Python's. Raises TypeError for what JSON has no form for."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, range | map | filter | zip) or type(value).__name__ in ("deque", "dict_keys", "dict_values"):
        return list(value)
    raise TypeError(f"the function returned a {type(value).__name__}, which JSON has no form for")


def _status(error: BaseException) -> int:
    """Returns the exit status of what ended the program, and says why as Python does."""
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
