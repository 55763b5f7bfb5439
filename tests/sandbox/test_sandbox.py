"""The sandbox as a library: what a program gets and gives, and what is its fault and what the machinery's."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from dapo.config.reward import SandboxConfig
from dapo.sandbox import client
from dapo.sandbox.client import Sandbox
from dapo.sandbox.program import Program, SandboxError, pack, send_piece
from dapo.sandbox.server import Waits, sweep
from tests.support.rewards.reward_children import busy_processes

LIMITS = SandboxConfig(cpu_s=20.0, wall_s=20.0, total_s=60.0)
WAITS = "open('here', 'w').close()\nimport time; time.sleep(100)"
HOLDS = """
import mmap, os, threading
held = []
for n in range(9):
    file = open('f', 'w+b')
    file.truncate(1)
    {}
threading.Thread(target=lambda: __import__('time').sleep(100)).start()
{}
"""
TEMPORARY = """
import tempfile, time
for n in range(30):
    with tempfile.NamedTemporaryFile() as file: file.write(b'x')
held = [tempfile.TemporaryFile() for n in range(16)]
time.sleep(0.2)
print(len(held))
"""
THREADS = """
import threading, time
threads = [threading.Thread(target=lambda: (bytearray(9999), time.sleep(0.1))) for _ in range(16)]
for thread in threads: thread.start()
print(len(threads))
"""
UNLINKED, RENAMED = "held.append(file); os.unlink('f')", "held.append(file); os.rename('f', 'g')"
MAPPED = "held.append(mmap.mmap(file.fileno(), 1)); file.close(); os.unlink('f')"
LEADER_ENDS = "import ctypes; ctypes.CDLL(None).syscall({'aarch64': 93}.get(os.uname().machine, 60), 0)"


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(LIMITS) as made:
        yield made


def programs_of(sandbox):
    return psutil.Process(sandbox.pid).children()


def until(condition):
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("source", "stdin", "stdout", "status"),
    [
        pytest.param("print(int(input()) + 1)", "41\n", "42\n", 0, id="input"),
        pytest.param("import sys; print(sys.stdin.read().split())", "a\nb", "['a', 'b']\n", 0, id="all-of-it"),
        pytest.param("print(open(0).read())", "x", "x\n", 0, id="descriptor"),
        pytest.param("print(input())", "\u00e9\u4e2d\n", "\u00e9\u4e2d\n", 0, id="unicode"),
        pytest.param("input()", "", "", 1, id="no-input"),
        pytest.param("if __name__ == '__main__': print(__name__)", "", "__main__\n", 0, id="main"),
        pytest.param("import sys; print(1); sys.exit(3)", "", "1\n", 3, id="exit"),
        pytest.param("raise SystemExit('no')", "", "", 1, id="exit-with-words"),
        pytest.param("print(1); 1 / 0", "", "1\n", 1, id="exception"),
        pytest.param("import atexit; atexit.register(print, 1); print(0)", "", "0\n1\n", 0, id="atexit"),
        pytest.param("import threading\nthreading.Timer(0.1, print, 'x').start()", "", "x\n", 0, id="late-thread"),
        pytest.param("import random; print(random.random(), hash('x'))", "", None, 0, id="the-same-each-time"),
        pytest.param("import numpy; print(numpy.arange(3).sum())", "", "3\n", 0, id="numpy"),
        pytest.param("import tempfile\ntempfile.TemporaryFile().write(b'x')\nprint(1)", "", "1\n", 0, id="files"),
        pytest.param(TEMPORARY, "", "16\n", 0, id="temporary-files"),
        pytest.param(THREADS, "", "16\n", 0, id="threads"),
        pytest.param("import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))", "", "5\n", 0, id="asyncio"),
        pytest.param("import dapo", "", "", 1, id="not-ours"),
    ],
)
def test_a_program_runs_as_python_runs_it(sandbox, source, stdin, stdout, status):
    outcome = sandbox.run(Program(source=source, stdin=stdin))
    wanted = sandbox.run(Program(source=source, stdin=stdin)).stdout if stdout is None else stdout
    assert (outcome.stdout, outcome.exit, outcome.reason) == (wanted, status, "")
    assert outcome.succeeded is (status == 0)


def test_a_traceback_shows_the_program_alone(sandbox):
    outcome = sandbox.run(Program(source="def f():\n    return 1 / 0\nf()\n"))
    assert outcome.stderr.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "program.py", line 3, in <module>',
        "    f()",
    ]
    assert outcome.stderr.endswith("ZeroDivisionError: division by zero\n") and "dapo" not in outcome.stderr


@pytest.mark.parametrize(
    ("source", "arguments", "result"),
    [
        pytest.param("def f(a, b): return a + b", (1, 2), "3", id="function"),
        pytest.param("class Solution:\n    def f(self, a): return [a]", ("x",), '["x"]', id="method"),
        pytest.param("def f(): return (1, {2: None})", (), '[1, {"2": null}]', id="tuple"),
        pytest.param("import numpy\ndef f(): return numpy.arange(2)", (), "[0, 1]", id="array"),
        pytest.param("def f(): return range(2)", (), "[0, 1]", id="range"),
        pytest.param("def f(a: List[int]): return gcd(*a)", ([4, 6],), "2", id="familiar-names"),
        pytest.param("def f(): return pow(2, 5, 7), sum([1])", (), "[4, 1]", id="builtins-stay"),
    ],
)
def test_a_function_is_called(sandbox, source, arguments, result):
    outcome = sandbox.run(Program(source=source, function="f", arguments=arguments, familiar=True))
    assert (outcome.result, outcome.exit) == (result, 0), outcome.stderr


def test_familiar_names_are_there_only_where_asked_for(sandbox):
    assert "NameError" in sandbox.run(Program(source="deque()")).stderr


@pytest.mark.parametrize(
    ("source", "limits", "reason"),
    [
        pytest.param("while True: pass", {"cpu_s": 0.1}, "cpu", id="cpu"),
        pytest.param(WAITS, {"wall_s": 0.1}, "wall", id="wall"),
        pytest.param("print('x' * 100)", {"output_bytes": 50}, "output", id="output"),
        pytest.param("for n in range(9): open(str(n), 'w').close()\n" + WAITS, {"files": 3}, "files", id="files"),
        pytest.param(HOLDS.format(UNLINKED, ""), {"files": 3}, "files", id="files-unlinked"),
        pytest.param(HOLDS.format(RENAMED, ""), {"files": 3}, "files", id="files-renamed-over"),
        pytest.param(HOLDS.format(MAPPED, ""), {"files": 3}, "files", id="files-mapped"),
        pytest.param(HOLDS.format(MAPPED, LEADER_ENDS), {"files": 3}, "files", id="files-of-another-thread"),
    ],
)
def test_what_is_beyond_a_limit_is_stopped(sandbox, source, limits, reason):
    outcome = sandbox.run(Program(source=source), replace(LIMITS, **limits))
    assert outcome.reason == reason and not outcome.succeeded
    assert "output_bytes" not in limits or len(outcome.stdout) <= limits["output_bytes"]


def test_memory_ends_where_it_is_limited(sandbox):
    assert sandbox.run(Program(source="x = bytearray(300 << 20)")).succeeded
    less = sandbox.run(Program(source="x = bytearray(300 << 20)"), replace(LIMITS, memory_bytes=200 << 20))
    assert less.stderr.endswith("MemoryError\n") and not less.succeeded


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waiting for a core")
def test_time_without_a_core_is_not_the_programs(sandbox):
    """It computes for most of its wall-clock limit, in threads one after the other, and beside it compute eight others
    for each core."""
    cpu_s = 0.4
    source = f"""
import threading, time
def work():
    end = time.thread_time() + {cpu_s / 4}
    while time.thread_time() < end: pass
work()
for _ in range(3):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""
    limits = replace(LIMITS, cpu_s=2 * cpu_s, wall_s=1.5 * cpu_s)
    with busy_processes(8):
        began = time.monotonic()
        outcome = sandbox.run(Program(source=source), limits)
        elapsed = time.monotonic() - began
    assert outcome.succeeded, outcome
    assert elapsed > limits.wall_s >= outcome.wall_s


def test_threads_that_sleep_are_stopped_on_a_busy_machine(sandbox):
    """Each waits for a core after each sleep, and none computes: waits of threads at once are one."""
    source = """
import threading, time
def nap():
    while True: time.sleep(0.002)
for _ in range(14): threading.Thread(target=nap, daemon=True).start()
time.sleep(200)
"""
    with busy_processes(8):
        assert sandbox.run(Program(source=source), replace(LIMITS, wall_s=0.5)).reason == "wall"


@pytest.mark.parametrize(
    ("looks", "waited_s"),
    [
        pytest.param([{"a": (0.25, True)}, {"a": (1.5, True)}, {"a": (1.75, False)}], 1.75, id="one-thread"),
        pytest.param([{"a": (n * 0.5, True), "b": (n * 1.0, True)} for n in (1, 2, 3)], 3.0, id="threads-at-once"),
        pytest.param([{"a": (0.5, True), "b": (2.0, n == 1)} for n in (1, 2)], 1.0, id="one-of-them-at-the-beginning"),
        pytest.param([{"a": (0.5, True)}, {"a": (0.75, False), "b": (0.5, True)}], 1.25, id="one-after-the-other"),
        pytest.param([{"a": (0.5, True)}, {"a": (1.25, False), "b": (0.5, True)}], 1.75, id="by-a-new-one"),
        pytest.param([{"a": (0.5, n == 1), "b": (n * 1.0, True)} for n in (1, 2)], 2.0, id="no-more-than-there-was"),
        pytest.param([{"a": (0.5, True)}, {"b": (0.5, True)}, {"b": (0.75, True)}], 1.75, id="one-has-ended"),
        pytest.param([{"a": (0.5, True)}, {"a": (0.25, True)}], 0.5, id="another-of-the-same-number"),
    ],
)
def test_waits_for_a_core_count_along_one_thread_at_a_time(looks, waited_s):
    waits = Waits(seen_at=0.0)
    for now, threads in enumerate(looks, 1):
        waits.see(threads, now)
    assert waits.total_s == waited_s


def in_the_background(sandbox, source=WAITS):
    """Starts a run; its outcome or error goes to the list."""
    found = []

    def run():
        try:
            found.append(sandbox.run(Program(source=source)))
        except SandboxError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_a_program_that_somebody_kills_is_run_once_more_and_then_has_no_outcome():
    with Sandbox(LIMITS) as sandbox:
        thread, found = in_the_background(sandbox)
        killed = []
        for _ in range(2):
            (one,) = until(lambda: [child for child in programs_of(sandbox) if child.pid not in killed])
            killed.append(one.pid)
            until(lambda one=one: not one.is_running() or one.status() == psutil.STATUS_SLEEPING)
            os.kill(one.pid, signal.SIGKILL)
        thread.join()
        assert isinstance(found[0], SandboxError)
        assert sandbox.run(Program(source="print(1)")).stdout == "1\n"


def test_a_server_that_ends_is_replaced_and_its_programs_end_with_it():
    with Sandbox(LIMITS) as sandbox:
        first = sandbox.pid
        thread, found = in_the_background(sandbox, "import time; time.sleep(1); print('done')")
        (program,) = until(lambda: programs_of(sandbox))
        os.kill(first, signal.SIGKILL)
        thread.join()
        assert found[0].stdout == "done\n"
        assert sandbox.pid != first
        until(lambda: not program.is_running() or program.status() == psutil.STATUS_ZOMBIE)


def test_a_program_that_nobody_waits_for_is_ended(sandbox):
    ours, theirs = socket.socketpair()
    with theirs:
        send_piece(sandbox._requests, asdict(LIMITS), [theirs.fileno()])
    ours.sendall(pack(asdict(Program(source=WAITS))))
    until(lambda: programs_of(sandbox))
    ours.close()
    until(lambda: not programs_of(sandbox))
    assert sandbox.run(Program(source="print(1)")).stdout == "1\n"


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    os.chmod(tmp_path, 0o755)
    with Sandbox(LIMITS) as sandbox:
        server = psutil.Process(sandbox.pid)
        (folder,) = tmp_path.iterdir()
        assert sandbox.run(Program(source="open('x', 'w').write('x')")).succeeded
        before = server.num_fds()  # perhaps with the few of the program that has just ended
        for _ in range(20):
            sandbox.run(Program(source="open('x', 'w').write('x')"))
        until(lambda: server.num_fds() <= before)
        assert list(folder.iterdir()) == []
    assert not folder.exists() and not server.is_running()


HANDLES = """
import os
from dapo.config.reward import SandboxConfig
from dapo.sandbox.client import Sandbox
from dapo.sandbox.program import Program

handles = [os.listdir("/proc/self/fd")]
with Sandbox(SandboxConfig()) as sandbox:
    for _ in range(20):
        sandbox.run(Program(source="print('x')"))
        handles.append(os.listdir("/proc/self/fd"))
print(handles[0] != handles[1] == handles[-1], handles[0] == os.listdir("/proc/self/fd"))
"""


def test_no_descriptor_is_left_open_where_programs_are_run_from():
    """In a process of its own: in that of the tests, the threads of Ray and asyncio open and close others."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", HANDLES], env=env, capture_output=True, text=True, timeout=300)
    assert (done.stdout.split(), done.stderr) == (["True", "True"], "")


def test_what_a_killed_server_left_behind_goes_when_another_one_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    os.chmod(tmp_path, 0o755)
    with Sandbox(LIMITS) as sandbox:
        (left,) = tmp_path.iterdir()
        os.kill(sandbox.pid, signal.SIGKILL)
        assert sandbox.run(Program(source="print(1)")).succeeded
        (held,) = set(tmp_path.iterdir()) - {left}
        sweep(tmp_path)
        assert left.exists(), "a server that starts holds its directory only a moment later"
        for folder in (left, held):
            os.utime(folder, (0, 0))
        sweep(tmp_path)
        assert not left.exists() and held.exists()
        assert sandbox.run(Program(source="open('x', 'w').write('x')")).succeeded


def test_a_server_whose_owner_is_killed_ends(tmp_path):
    program = (
        "import os, signal\nfrom dapo.config.reward import SandboxConfig\nfrom dapo.sandbox.client import Sandbox\n"
        "sandbox = Sandbox(SandboxConfig())\nprint(sandbox.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    until(lambda: not psutil.pid_exists(int(done.stdout)))
    assert list(tmp_path.iterdir()) == []


def test_what_it_refuses_to_start_with():
    with pytest.raises(ValueError, match="cannot be confined on this machine.*reward.limits.allow_unconfined=true"):
        Sandbox(LIMITS, files=[])
    with pytest.raises(ValueError, match=r"`reward.limits.sandbox.packages` names 'no_such_package'"):
        Sandbox(replace(LIMITS, packages=["numpy", "no_such_package"]))
    with Sandbox(LIMITS, files=[], allow_unconfined=True) as sandbox:
        assert sandbox.way.files == "" and "allow_unconfined" in sandbox.way.describe()
        assert sandbox.run(Program(source="print(1)")).stdout == "1\n"


def test_a_machine_that_gives_no_process_is_not_the_programs_fault(tmp_path, monkeypatch):
    """Its directory is gone, as when somebody empties /tmp."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    os.chmod(tmp_path, 0o755)
    with Sandbox(LIMITS) as sandbox:
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)
        with pytest.raises(SandboxError, match="no process for a program"):
            sandbox.run(Program(source="print(1)"))


@pytest.mark.timeout(60)
def test_who_sends_to_a_server_that_stands_still_hears_of_it(monkeypatch):
    """Once the socket is full of programs that nobody takes, sending another would block."""
    monkeypatch.setattr(client, "SETUP_S", 0.2)
    with Sandbox(LIMITS) as sandbox:
        os.kill(sandbox.pid, signal.SIGSTOP)
        try:
            with suppress(OSError):
                while True:
                    sandbox._requests.send(b"{}")
            with pytest.raises(SandboxError, match="no outcome"):
                sandbox.run(Program(source="print(1)"))
        finally:
            os.kill(sandbox.pid, signal.SIGKILL)


def test_the_program_of_the_readme_runs():
    readme = (Path(__file__).resolve().parents[2] / "dapo/sandbox/README.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    exec(program, {})
