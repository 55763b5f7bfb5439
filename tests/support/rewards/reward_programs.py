"""A reward function that does what a response tells it to: in the tests of children, workers and faults."""

PROGRAM = '''
import ctypes, os, socket, subprocess, sys, threading, time, warnings

KEPT = []

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    word, _, rest = solution_str.partition(" ")
    action = ACTIONS.get(word)
    if action is not None:
        return action(rest)
    return {"score": 1.0 if solution_str == ground_truth else -1.0, "pred": solution_str}

def length(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))

def spin(rest):
    while True:
        pass

def leak(rest):
    """Maps memory, which is what the limit counts, and does not write to it: a busy machine takes long for that, and
    the limit of CPU time might come first."""
    while True:
        KEPT.append(bytes(1 << 20))

def keep(rest):
    KEPT.append(bytearray(int(rest) << 20))
    return 1.0

def once(rest):
    """Ends its process the first time that any process comes here; `rest` is a file that remembers."""
    try:
        os.close(os.open(rest, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return 1.0
    os._exit(3)

def hold(rest):
    """Waits for a program that takes long."""
    program = subprocess.Popen(["sleep", "300"])
    with open(rest, "w") as file:
        file.write(str(program.pid))
    program.wait()

def thread(rest):
    done = threading.Thread(target=lambda: KEPT.append(1))
    done.start()
    done.join()
    return 1.0

def linger(rest):
    """Leaves a thread behind that burns CPU time."""
    threading.Thread(target=spin, args=("",), daemon=True).start()
    return 1.0

def idle(rest):
    """Keeps a thread that waits, as a pool of connections does."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return 1.0

def write(rest):
    with open(rest, "w") as file:
        file.write("x" * (2 << 20))
    return 1.0

ACTIONS = {
    "hang": lambda rest: time.sleep(1000),
    "pause": lambda rest: time.sleep(float(rest)) or 1.0,
    "spin": spin, "leak": leak, "keep": keep, "once": once, "hold": hold, "linger": linger, "idle": idle,
    "thread": thread, "write": write,
    "power": lambda rest: float(9 ** 9 ** 9),
    "segfault": lambda rest: ctypes.string_at(0),
    "exit": lambda rest: os._exit(0),
    "sysexit": lambda rest: sys.exit(3),
    "raise": lambda rest: {}[rest],
    "none": lambda rest: None,
    "nan": lambda rest: float("nan"),
    "text": lambda rest: "SECRET",
    "keys": lambda rest: {"score": 1.0, "steps": 3, "note": "x"},
    "nokeys": lambda rest: {"steps": 1},
    "socket": lambda rest: socket.socket(),
    "fork": lambda rest: os.fork(),
    "run": lambda rest: subprocess.run(["true"]),
    "print": lambda rest: print("SECRET" * 10000) or 1.0,
    "pid": lambda rest: {"score": 1.0, "pid": os.getpid()},
    "modules": lambda rest: {"score": 1.0, "heavy": len({"ray", "torch", "asyncio"} & set(sys.modules))},
    "told": lambda rest: {"score": 1.0, "secrets": sum("s3cr3t" in value for value in os.environ.values())},
    "warn": lambda rest: warnings.warn("\\x1b[2J SECRET") or 1.0,
    "talk": lambda rest: [os.write(fd, b"no frame") for fd in range(3, 9) if is_socket(fd)] and 1.0,
}

def is_socket(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket")
    except OSError:
        return False
'''

CANARIES = """
def canaries(name, kwargs):
    yield "7", "7", {}, 1.0
    yield "8", "7", {}, -1.0
"""
