"""Hostile programs by what they try: `$name` stands for what the test has made outside of the sandbox.

Each goes on where a step is refused, so that a later one still gets its chance, and writes what it found: the expected
output is a word that it could only have found there.
"""

from string import Template

HEAD = """
import contextlib, ctypes, fcntl, mmap, os, signal, socket, struct, sys, time
NUMBERS = {"x86_64": $x86_64, "aarch64": $aarch64}[os.uname().machine]
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *given):
    return libc.syscall(NUMBERS[name], *[ctypes.c_long(one) if isinstance(one, int) else one for one in given])
@contextlib.contextmanager
def attempt():
    try:
        yield
    except Exception:
        pass
def attempts(*acts):
    for act in acts:
        with attempt():
            print(act())
"""
_CALLS = (  # name, x86_64, aarch64
    "ptrace 101 117 process_vm_readv 310 270 process_vm_writev 311 271 rt_sigqueueinfo 129 138 tgkill 234 131 "
    "tkill 200 130 pidfd_open 434 434 pidfd_send_signal 424 424 shmget 29 194 shmat 30 196 semget 64 190 msgget 68 186 "
    "memfd_create 319 279 io_uring_setup 425 425 keyctl 250 219 add_key 248 217 bpf 321 280 perf_event_open 298 241 "
    "userfaultfd 323 282 unshare 272 97 setns 308 268 mount 165 40 chroot 161 51 pivot_root 155 41 mknodat 259 33 "
    "timer_create 222 107 timer_settime 223 110 seccomp 317 277 personality 135 92 mq_open 240 180 inotify_init1 294 "
    "26 "
    "capset 126 91 setuid 105 146 clone 56 220 clone3 435 435 kcmp 312 272 pidfd_getfd 438 438 process_madvise 440 440 "
    "name_to_handle_at 303 264 open_tree 428 428 fsopen 430 430 openat2 437 437 setxattr 188 5 linkat 265 37 "
    "symlinkat 266 36 fanotify_init 300 262 reboot 169 142 sethostname 170 161 swapoff 168 225 landlock_create_ruleset "
    "444 444 ioprio_set 251 30 sched_setattr 314 274 migrate_pages 256 238 move_pages 279 239"
).split()
X86_64 = {name: int(number) for name, number in zip(_CALLS[::3], _CALLS[1::3], strict=True)}
AARCH64 = {name: int(number) for name, number in zip(_CALLS[::3], _CALLS[2::3], strict=True)}

PROCESSES = {
    "fork bomb": "while True: os.fork()",
    "stubborn fork bomb": "while True:\n    with attempt(): os.fork()",
    "bomb of raw clones": (
        "while True: call('clone', signal.SIGCHLD, 0, 0, 0, 0); call('clone3', ctypes.create_string_buffer(88), 88)"
    ),
    "bomb of threads": "import threading\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "stubborn bomb of threads": (
        "import _thread, threading\nthreading.stack_size(32768)\n"
        "while True:\n    with attempt(): _thread.start_new_thread(time.sleep, (60,))"
    ),
    "posix_spawn": "os.posix_spawn('/bin/sh', ['sh', '-c', 'echo $truth'], {})",
    "execve": "os.execv('/bin/sh', ['sh', '-c', 'cat $secret_file'])",
    "subprocess": (
        "import subprocess\nprint(subprocess.check_output('cat $secret_file; touch $folder/made', shell=True))"
    ),
    "os.system": "print(os.system('cat $secret_file; touch $folder/made'))",
    "multiprocessing": "import multiprocessing\nmultiprocessing.Process(target=print, args=('$folder',)).start()",
    "daemon": "attempts(os.setsid, os.setpgrp, os.fork)\ntime.sleep(60)",
}
SIGNALS = {
    "kill all": "attempts(*(lambda n=n: os.kill(-1, n) for n in (9, 15, 19)))",
    "kill the group": "attempts(lambda: os.kill(0, 9), lambda: os.killpg(0, 9), lambda: os.killpg($victim, 9))",
    "kill a process": "attempts(*(lambda n=n: os.kill($victim, n) for n in (9, 15, 19, 0)))",
    "kill the parent": "attempts(lambda: os.kill(os.getppid(), 9))",
    "kill with raw calls": (
        "attempts(lambda: call('tgkill', $victim, $victim, 9), lambda: call('tkill', $victim, 9),\n"
        "    lambda: call('rt_sigqueueinfo', $victim, 9, ctypes.create_string_buffer(128)))\n"
        "handle = call('pidfd_open', $victim, 0)\nprint(call('pidfd_send_signal', handle, 9, 0, 0))"
    ),
    "signal of a pipe": (
        "a, b = os.pipe()\n"
        "attempts(lambda: fcntl.fcntl(a, 10, 9), lambda: fcntl.fcntl(a, fcntl.F_SETOWN, $victim))\n"
        "attempts(lambda: fcntl.ioctl(a, 0x8901, struct.pack('i', $victim)), lambda: fcntl.fcntl(a, 15, "
        "struct.pack('ii', 1, $victim)))\n"
        "attempts(lambda: fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC))\nos.write(b, b'x')"
    ),
    "kill itself": "attempts(lambda: os.kill(os.getpid(), 9), lambda: call('tgkill', os.getpid(), os.getpid(), 9))",
    "timer that kills itself": (
        "event = struct.pack('@Qii', 0, 9, 0) + bytes(48)\ntimer = ctypes.c_int()\n"
        "call('timer_create', 0, event, ctypes.byref(timer))\n"
        "call('timer_settime', timer.value, 0, struct.pack('@qqqq', 0, 0, 0, 1000000), 0)\ntime.sleep(0.1)"
    ),
    "stop itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "ignore every signal": (
        "for n in range(1, 65):\n    with attempt(): signal.signal(n, signal.SIG_IGN)\nwhile True: pass"
    ),
    "outlive the parent": "call_prctl = libc.prctl(1, 0)\nlibc.prctl(4, 0)\nprint(call_prctl)",
}
MEMORY_OF_OTHERS = {
    "ptrace": "attempts(*(lambda n=n: call('ptrace', n, $victim, 0, 0) for n in (16, 0x4206)))",
    "process_vm": (
        "box = ctypes.create_string_buffer(8)\nvector = struct.pack('@QQ', ctypes.addressof(box), 8)\n"
        "attempts(*(lambda n=n: call(n, $victim, vector, 1, vector, 1, 0) for n in ('process_vm_readv', "
        "'process_vm_writev')))"
    ),
    "/proc/pid/mem": (
        "attempts(lambda: open('/proc/$victim/mem', 'r+b'), lambda: open(f'/proc/{os.getppid()}/mem', 'rb'))"
    ),
    "descriptors of others": (
        "handle = call('pidfd_open', os.getppid(), 0)\n"
        "attempts(*(lambda n=n: call('pidfd_getfd', handle, n, 0) for n in range(9)))\n"
        "attempts(lambda: os.listdir(f'/proc/{os.getppid()}/fd'), lambda: os.listdir('/proc'))"
    ),
    "/proc writes": (
        "for name in ('self/oom_score_adj', 'sys/kernel/hostname', 'self/mem', '$victim/oom_score_adj', "
        "'sysrq-trigger'):\n"
        "    attempts(lambda: open('/proc/' + name, 'w').write('-1000'))"
    ),
    "limits and priority of others": (
        "import resource\n"
        "attempts(lambda: resource.prlimit($victim, resource.RLIMIT_NOFILE, (3, 3)),\n"
        "    lambda: os.setpriority(os.PRIO_PROCESS, $victim, 19), lambda: os.sched_setaffinity($victim, {0}),\n"
        "    lambda: os.sched_setscheduler($victim, os.SCHED_IDLE, os.sched_param(0)),\n"
        "    lambda: call('ioprio_set', 1, $victim, 0x6000), lambda: call('migrate_pages', $victim, 8, 0, 0))"
    ),
    "its own limits": (
        "import resource\n"
        "for kind in range(16):\n"
        "    with attempt(): resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "attempts(lambda: os.nice(19), lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)))\n"
        "hold = [bytearray(1 << 26) for _ in range(100)]"
    ),
}
FILES = {
    "truncate a checkpoint": (
        "attempts(lambda: os.truncate('$checkpoint', 0), lambda: os.open('$checkpoint', os.O_RDONLY | os.O_TRUNC),\n"
        "    lambda: open('$checkpoint', 'w'), lambda: open('$checkpoint', 'r+b').truncate(1))"
    ),
    "remove and rename": (
        "attempts(lambda: os.unlink('$checkpoint'), lambda: os.rename('$checkpoint', 'mine'),\n"
        "    lambda: os.rename('$checkpoint', '$checkpoint.bak'), lambda: os.rmdir('$folder'))\n"
        "open('x', 'w').write('x')\nattempts(lambda: os.replace('x', '$checkpoint'))"
    ),
    "modes, owners, times": (
        "attempts(lambda: os.chmod('$checkpoint', 0o777), lambda: os.chown('$checkpoint', 1, 1),\n"
        "    lambda: os.utime('$checkpoint', (0, 0)), lambda: os.setxattr('$checkpoint', 'user.x', b'x'),\n"
        "    lambda: os.chmod('$folder', 0))"
    ),
    "symlinks": (
        "attempts(lambda: os.symlink('$checkpoint', 'link'), lambda: open('link', 'w'), lambda: open('link').read(),\n"
        "    lambda: os.symlink('/', 'root'), lambda: os.listdir('root'))"
    ),
    "hard links": "attempts(lambda: os.link('$checkpoint', 'link'), lambda: open('link', 'w'))",
    "parents": (
        "attempts(lambda: open('../x', 'w'), lambda: os.mkdir('../y'), lambda: os.listdir('..'), "
        "lambda: os.mkdir('$folder/y'))"
    ),
    "make files outside": (
        "attempts(lambda: open('$folder/made', 'w'), lambda: open('/tmp/dapo-made-$victim', 'w'), "
        "lambda: os.mkfifo('$folder/fifo'))"
    ),
    "devices": (
        "attempts(lambda: os.mknod('disk', 0o60666, os.makedev(254, 0)), lambda: call('mknodat', -100, b'm', "
        "0o20666, 0x101),\n"
        "    lambda: open('disk', 'rb').read(9), lambda: open('/dev/mem', 'rb'), lambda: os.listdir('/dev'))"
    ),
    "read the data": (
        "attempts(lambda: open('$secret_file').read(), lambda: os.listdir('$folder'), "
        "lambda: open('$checkpoint').read())"
    ),
    "read it by other calls": (
        "here = os.open('.', os.O_RDONLY)\n"
        "attempts(lambda: os.open('$secret_file', os.O_PATH), lambda: os.readlink('/proc/self/exe'),\n"
        "    lambda: call('openat2', -100, b'$secret_file', ctypes.create_string_buffer(24), 24),\n"
        "    lambda: call('name_to_handle_at', -100, b'/', ctypes.create_string_buffer(64), "
        "ctypes.create_string_buffer(8), 0),\n"
        "    lambda: os.chroot('.'), lambda: os.fchdir(here), lambda: os.sendfile(1, os.open('$secret_file', 0), 0, "
        "99))"
    ),
    "mount": (
        "attempts(lambda: call('unshare', 0x10020000), lambda: call('mount', 0, b'/', 0, 0x44000, 0),\n"
        "    lambda: call('chroot', b'.'), lambda: call('open_tree', -100, b'/', 1), lambda: call('fsopen', "
        "b'tmpfs', 0),\n"
        "    lambda: call('setns', 3, 0), lambda: call('pivot_root', b'.', b'.'))"
    ),
    "fill the directory": (
        "for n in range(100000):\n    with attempt():\n"
        "        with open(str(n), 'wb') as file: file.write(bytes(1 << 10))"
    ),
    "a file too large": "file = open('large', 'wb')\nwhile True: file.write(bytes(1 << 20))",
    "fill /dev/shm": "file = open('/dev/shm/dapo-$victim', 'wb')\nwhile True: file.write(bytes(1 << 20))",
    "shared memory": (
        "from multiprocessing import shared_memory\n"
        "attempts(lambda: shared_memory.SharedMemory('dapo-$victim', create=True, size=1 << 20))\n"
        "attempts(lambda: call('shmget', $victim, 1 << 20, 0o1666), lambda: call('semget', $victim, 1, 0o1666),\n"
        "    lambda: call('msgget', $victim, 0o1666), lambda: call('mq_open', b'dapo-$victim', 0o102, 0o666, 0))"
    ),
    "memory in files without a name": (
        "held = [call('memfd_create', b'x', 0) for _ in range(50)]\n"
        "for handle in held:\n    attempts(lambda: os.write(handle, bytes(1 << 24)))"
    ),
}
NETWORK = {
    "TCP": "attempts(lambda: socket.create_connection(('127.0.0.1', $port), 1).send(b'here'))",
    "UDP": "attempts(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'here', ('127.0.0.1', $port)))",
    "Unix socket": "attempts(lambda: socket.socket(socket.AF_UNIX).connect('$unix'))",
    "datagram of a pair": (
        "attempts(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'here', '$unix'))\n"
        "attempts(lambda: socket.socketpair()[0].sendto(b'here', '$unix'), "
        "lambda: socket.socketpair()[0].connect('$unix'))"
    ),
    "a server": "attempts(lambda: socket.create_server(('127.0.0.1', 0)), lambda: socket.socketpair()[0].bind('s'))",
    "raw and netlink": "attempts(*(lambda f=f: socket.socket(f, socket.SOCK_RAW) for f in (2, 10, 16, 17, 38, 40)))",
    "a name of the DNS": (
        "attempts(lambda: socket.gethostbyname('example.com'), lambda: socket.getaddrinfo('example.com', 80))"
    ),
    "io_uring": "attempts(lambda: call('io_uring_setup', 8, ctypes.create_string_buffer(120)))",
    "URL": (
        "import urllib.request\nattempts(lambda: urllib.request.urlopen('http://127.0.0.1:$port', timeout=1).read())"
    ),
}
KERNEL = {
    "kernel interfaces": (
        "for name in ('keyctl', 'add_key', 'bpf', 'perf_event_open', 'userfaultfd', 'inotify_init1', 'fanotify_init',\n"
        "    'capset', 'setuid', 'personality', 'seccomp', 'reboot', 'sethostname', 'swapoff', "
        "'landlock_create_ruleset'):\n"
        "    print(call(name, 0, 0, 0, 0, 0))"
    ),
    "become root": (
        "attempts(lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]), lambda: os.umask(0))"
    ),
    "terminal": "attempts(*(lambda n=n: fcntl.ioctl(n, 0x5412, b'x') for n in range(3)))",
    "calls of 32 bits": (
        "page = mmap.mmap(-1, 4096, prot=7)\n"  # kill(victim, 9) by int 0x80
        "page.write(b'\\xb8\\x25\\0\\0\\0\\xbb' + struct.pack('<I', $victim) + b'\\xb9\\x09\\0\\0\\0\\xcd\\x80\\xc3')\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()"
    ),
    "calls of x32": (
        "attempts(*(lambda n=n: libc.syscall(ctypes.c_long(0x40000000 + n), $victim, 9) for n in (62, 57, 58)))"
    ),
}
ALL = {"processes": PROCESSES, "signals": SIGNALS, "memory": MEMORY_OF_OTHERS, "files": FILES, "network": NETWORK}
OUTWARD = {name: body for kind in (*ALL.values(), KERNEL) for name, body in kind.items()}


def source(body: str, outside: dict[str, object]) -> str:
    """Returns the whole program."""
    return Template(HEAD + body).substitute(outside, x86_64=X86_64, aarch64=AARCH64)
