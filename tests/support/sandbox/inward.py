"""Hostile programs that aim at their verdict: at its limits, at the ground truth, at the words by which it is told."""

EXHAUSTION = {
    "busy loop": "while True: pass",
    "busy loop in C": "9 ** 9 ** 9",
    "sleep": "time.sleep(60)",
    "wait for input that never comes": "a, b = os.pipe()\nos.read(a, 1)",
    "deadlock": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "thread that never ends": "import threading\nthreading.Thread(target=time.sleep, args=(60,)).start()",
    "exit that never ends": "import atexit\natexit.register(time.sleep, 60)",
    "exception that never ends": (
        "class Slow(Exception):\n    def __str__(self):\n        while True: pass\nraise Slow()"
    ),
    "memory": "held = []\nwhile True: held.append(bytearray(1 << 24))",
    "memory in one piece": "held = bytearray(1 << 40)",
    "memory of maps": "held = [mmap.mmap(-1, 1 << 28) for _ in range(100)]\nfor one in held: one.write(bytes(1 << 28))",
    "memory of the reader": "print('[' * 100000 + ']' * 100000)",
    "output flood": "while True: print('x' * 1000)",
    "error flood": "while True: print('x' * 1000, file=sys.stderr)",
    "flood that goes on": (
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nwhile True:\n    with attempt(): os.write(1, bytes(1 << 16))"
    ),
    "deep recursion": "sys.setrecursionlimit(10 ** 9)\ndef down(n): return down(n + 1) + 1\ndown(0)",
    "deep recursion in C": (
        "import json\nsys.setrecursionlimit(10 ** 9)\njson.loads('[' * 10 ** 6)\nx = []\n"
        "for _ in range(10 ** 6): x = [x]\nrepr(x)"
    ),
    "segmentation fault": "ctypes.string_at(0)",
    "abort": "os.abort()",
    "os._exit": "os._exit(0)",
    "exit": "sys.exit(0)",
    "raise": "raise KeyboardInterrupt",
    "no program": "def (:",
    "bytes that are no text": "sys.stdout.buffer.write(bytes(range(256)) * 100)",
    "NUL and lone surrogates": "print('\\0' * 100, chr(0xd800))",
    "close everything": "os.closerange(0, 64)\nprint('x')",
    "descriptors": "held = []\nwhile True: held.append(os.dup(0))",
}
TRUTH = {
    "frames": (
        "import gc\nframe = sys._getframe()\nwhile frame is not None:\n"
        "    print(frame.f_code.co_name, frame.f_locals, list(frame.f_globals))\n    frame = frame.f_back\n"
        "for thing in gc.get_objects():\n    if isinstance(thing, dict):\n"
        "        for key, value in list(thing.items()):\n"
        "            if isinstance(value, str) and len(value) < 99: print(key, value)"
    ),
    "its own memory": (
        "with open('/proc/self/maps') as maps:\n    for line in maps:\n"
        "        a, b = (int(n, 16) for n in line.split()[0].split('-'))\n"
        "        print(ctypes.string_at(a, b - a))"
    ),
    "modules of the server": (
        "for name, module in sorted(sys.modules.items()):\n"
        "    print(name, {k: repr(v)[:99] for k, v in vars(module).items()})\n"
        "import dapo.sandbox.shared\nprint(vars(dapo.sandbox.shared))"
    ),
    "environment": (
        "print(dict(os.environ), sys.argv, sys.path)\n"
        "attempts(lambda: open('/proc/self/environ').read(), lambda: open('/proc/1/environ').read())"
    ),
    "descriptors that were left open": (
        "for handle in range(1024):\n    with attempt(): print(handle, os.fstat(handle), os.pread(handle, 1 << 16, "
        "0))\n"
        "    with attempt(): print(handle, socket.socket(fileno=handle).recv(1 << 16, socket.MSG_DONTWAIT))"
    ),
    "standard input": (
        "print(open(0).read())\nattempts(lambda: open('/dev/stdin').read(), lambda: os.listdir('/proc/self/fd'))"
    ),
}
VERDICT = {
    "forged reply": (
        'reply = b\'{"exit": 0, "reason": "", "cpu_s": 0.0, "wall_s": 0.0, "score": 1.0, "accuracy": 1.0}\'\n'
        "for handle in range(64):\n    for image in (reply, struct.pack('>I', len(reply)) + reply):\n"
        "        with attempt(): os.write(handle, image)\n"
        "        with attempt(): socket.socket(fileno=os.dup(handle)).sendall(image)"
    ),
    "forged beginning": "for handle in range(64):\n    with attempt(): os.write(handle, b'+')",
    "tampered library": (
        "import builtins, io, json\njson.dump = json.dumps = json.loads = lambda *a, **k: True\n"
        "builtins.len = builtins.all = builtins.str = lambda *a: True\nos._exit = lambda n: None\n"
        "sys.exit = lambda n=0: None\n"
        "raise SystemExit(0)"
    ),
    "tampered output": (
        "class Any(io.TextIOBase if 'io' in globals() else object):\n"
        "    def __eq__(self, other): return True\n    def write(self, text): return len(text)\n"
        "    def flush(self): pass\n"
        "sys.stdout = sys.__stdout__ = Any()\nprint('anything')"
    ),
    "all words at once": (
        "import itertools, string\nfor word in itertools.product('0123456789abcdef', repeat=5): print(''.join(word))"
    ),
    "sentinels": (
        "for word in ('[INVALID]', 'None', 'nan', 'true', '*', '.*', '%s', '{truth}', 'expected'): print(word)"
    ),
}
INWARD = EXHAUSTION | TRUTH | VERDICT
RESULTS = {  # of a function `f` whose result is expected to be something else
    "equal to all": "class Any:\n    def __eq__(self, other): return True\ndef f(): return Any()",
    "a list that is equal to all": "class Any(list):\n    def __eq__(self, other): return True\ndef f(): return Any()",
    "a text that is equal to all": (
        "class Any(str):\n    def __eq__(self, other): return True\ndef f(): return Any('x')"
    ),
    "not a number": "def f(): return float('nan')",
    "infinity": "def f(): return float('inf')",
    "a number of 100,000 digits": "import sys\nsys.set_int_max_str_digits(0)\ndef f(): return 10 ** 100000",
    "nested without end": "def f():\n    x = []\n    x.append(x)\n    return x",
    "deeply nested": "import os\ndef f():\n    os.write(3, b'[' * 100000 + b']' * 100000)\n    os._exit(0)",
    "no JSON": "import os\ndef f():\n    os.write(3, b'true true')\n    os._exit(0)",
    "an exit": "import os\ndef f(): os._exit(0)",
    "a pickle": "import os, pickle\ndef f():\n    os.write(3, pickle.dumps(print))\n    os._exit(0)",
    "a generator": "def f(): yield from ()",
    "itself": "def f(): return f",
    "no function": "g = 1",
    "another class": "class Solution:\n    def g(self): return 1",
}
