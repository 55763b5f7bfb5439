"""Stands in for Slurm on `machines`: sbatch runs the script on the first one, srun starts a task on each, scontrol
queues the job again, and the signals are those that Slurm's daemons send.

srun and scontrol on a machine are `slurm_client.py`, which speaks to this process through a socket in a shared folder.
"""

import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.support.netns.machines import SCRATCH, Machine, process_of, signal_there

ROOT = Path(__file__).resolve().parents[3]
CLIENT = Path(__file__).with_name("slurm_client.py")
JOB = "7"
KILL_WAIT_S = 30.0  # Slurm's own default
TIME_LIMIT_S = 86_400


class Slurm:
    """One job at a time on all machines. folder: what they share, with a checkout in it. requeued: how often the job
    queued itself again. tasks: steps' processes by machine, of which the last are the job's."""

    def __init__(self, folder: Path, machines: Sequence[Machine], python: str = sys.executable) -> None:
        self.folder, self.machines, self._python = folder, machines, python
        self.requeued = 0
        self.left: list[str] = []
        self.output = folder / "job.log"
        self._server = _Server(str(folder / "slurm.socket"), self)
        self._bin = folder / "bin"
        self._bin.mkdir()
        (folder / "launch").symlink_to(ROOT / "launch")
        for name in ("srun", "scontrol", "squeue"):
            script = self._bin / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {CLIENT} {folder}/slurm.socket {name} "$@"\n')
            script.chmod(0o755)
        self._batch: subprocess.Popen[Any] | None = None
        self._tasks: list[subprocess.Popen[Any]] = []
        self._again = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._end_all(0.0)

    def sbatch(self, script: str, *arguments: str, **env: str) -> None:
        """Starts launch/slurm/`script`. env: as the person who submits it has it."""
        self._line = ["bash", f"launch/slurm/{script}", *arguments]
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            **{"PATH": f"{self._bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "PYTHON": self._python},
            **{"SLURM_SUBMIT_DIR": str(self.folder), "SLURM_JOB_ID": JOB, "SLURM_CPUS_ON_NODE": "8"},
            **{"SLURM_JOB_NUM_NODES": str(len(self.machines)), "SLURM_JOB_NAME": "dapo"},
            **{"SLURM_JOB_NODELIST": ",".join(machine.name for machine in self.machines), "NODE_DISK": SCRATCH},
            **env,
        }
        self._start()

    def _start(self) -> None:
        self._again.clear()
        self._began = time.time()
        env = self._env | {"SLURM_RESTART_COUNT": str(self.requeued)}
        with self.output.open("a") as log:
            self._batch = self.machines[0].start(
                self._line, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def scancel(self, number: signal.Signals) -> None:
        """Sends a signal to the batch script alone, as `scancel --batch --signal` and the time limit do."""
        assert self._batch is not None
        signal_there(self._batch, number)

    def wait(self, timeout_s: float) -> int:
        """Returns the batch script's exit code; the job is over, unless it has queued itself again and runs."""
        assert self._batch is not None
        try:
            code = self._batch.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {timeout_s:g} s:\n{self.said()}") from None
        self.left = [" ".join(process.cmdline()) for machine in self.machines for process in machine.work()]
        self._end_all(KILL_WAIT_S)
        if self._again.is_set():
            self.requeued += 1
            self._start()
        return code

    def until(self, condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """Waits for something while the job runs; returns what the condition returned."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s:\n{self.said()}"
            assert self._batch is None or self._batch.poll() is None, f"no {what}, and the job ended:\n{self.said()}"
            time.sleep(0.1)
        return found

    def said(self) -> str:
        return self.output.read_text()

    def srun(self, request: dict[str, Any]) -> list[subprocess.Popen[Any]]:
        """Starts a task on each machine that the options name."""
        options = dict(word.removeprefix("--").partition("=")[::2] for word in request["options"])
        chosen = [each for each in self.machines if each.name != options.get("exclude")]
        if "nodelist" in options:
            chosen = [each for each in chosen if each.name in options["nodelist"].split(",")]
        assert len(chosen) == int(options["ntasks"]), f"{options} on {[each.name for each in chosen]}"
        tasks = []
        for machine in chosen:
            with open(options["output"].replace("%N", machine.name), "ab") as log:
                how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                tasks.append(machine.start(request["command"], cwd=request["cwd"], env=request["env"], **how))
        self._tasks += tasks
        return tasks

    def answer(self, request: dict[str, Any]) -> str:
        """What scontrol and squeue print."""
        match request["name"], request["options"]:
            case "scontrol", ["show", "hostnames", names]:
                return str(names).replace(",", "\n")
            case "scontrol", ["requeue", job]:
                assert job == JOB
                self._again.set()
                return ""
            case "squeue", _:
                return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self._began + TIME_LIMIT_S))
            case other:
                raise AssertionError(f"no stand-in for {other}")

    def _end_all(self, grace_s: float) -> None:
        """What Slurm does with what a job leaves behind: SIGTERM, and SIGKILL after a while."""
        left = [process for process in [*self._tasks, self._batch] if process is not None and process.poll() is None]
        for process in left:
            signal_there(process, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(process.poll() is None for process in left) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._tasks.clear()
        for machine in self.machines:
            for process in machine.work():
                _kill(process)
        for process in left:
            process.wait(timeout=KILL_WAIT_S)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: str, slurm: Slurm) -> None:
        self.slurm = slurm
        super().__init__(path, _Call)


class _Call(socketserver.StreamRequestHandler):
    """One srun, scontrol or squeue: a line that says what is wanted, then numbers of signals; one line back."""

    server: _Server

    def handle(self) -> None:
        request = json.loads(self.rfile.readline())
        if request["name"] != "srun":
            self._end(0, self.server.slurm.answer(request))
            return
        tasks = self.server.slurm.srun(request)
        threading.Thread(target=self._pass_on, args=[tasks], daemon=True).start()
        codes = [task.wait() for task in tasks]
        self._end(max(code if code >= 0 else 128 - code for code in codes), "")

    def _pass_on(self, tasks: Sequence[subprocess.Popen[Any]]) -> None:
        # To all that a task has started, as Slurm does where it follows processes without cgroups.
        for line in self.rfile:
            for task in tasks:
                if (there := process_of(task)) is not None:
                    for process in (there, *there.children(recursive=True)):
                        process.send_signal(int(line))

    def _end(self, code: int, text: str) -> None:
        try:
            self.wfile.write((json.dumps({"code": code, "text": text}) + "\n").encode())
        except OSError:  # whoever asked is gone
            pass
