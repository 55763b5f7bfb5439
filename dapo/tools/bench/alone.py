"""Runs a measurement in a process of its own, with a deadline."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

STOP_S = 20.0  # for a process to end by itself after its deadline

Row = dict[str, Any]
Send = Callable[[Row], None]


def alone(work: Callable[..., None], *given: Any, timeout_s: float) -> Iterator[Row]:
    """Yields what `work(send, *given)` sends, from a process of its own, which starts with an empty device. Raises
    RuntimeError with the reason if it fails or is not done in time; then nothing of it is left running."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work_alone, args=(sender, work, given))
    process.start()
    sender.close()
    ends = time.monotonic() + timeout_s
    try:
        while receiver.poll(max(ends - time.monotonic(), 0)):
            try:
                row = receiver.recv()
            except EOFError:
                process.join()
                if process.exitcode:
                    raise RuntimeError(f"its process ended with exit code {process.exitcode}") from None
                return
            if isinstance(row, str):
                raise RuntimeError(row)
            yield row
        raise RuntimeError(f"not done in {timeout_s:.0f} s")
    finally:
        _end(process)


def _work_alone(sender: Connection, work: Callable[..., None], given: Sequence[Any]) -> None:
    os.setpgrp()  # so that the processes it starts can be ended with it
    try:
        work(sender.send, *given)
    except BaseException as error:
        sender.send(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        raise


def _end(process: multiprocessing.process.BaseProcess) -> None:
    assert process.pid is not None
    with suppress(ProcessLookupError):
        if process.is_alive():
            os.kill(process.pid, signal.SIGINT)  # Ray and engines end in order
            process.join(STOP_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
