"""srun, scontrol and squeue on a machine of `slurm.py`: say what is wanted, pass signals on, print the answer."""

import json
import os
import signal
import socket
import sys

path, name, *words = sys.argv[1:]
options = list(words)
command: list[str] = []
if name == "srun":
    first = next(i for i, word in enumerate(words) if not word.startswith("--"))
    options, command = words[:first], words[first:]
here = socket.socket(socket.AF_UNIX)
here.connect(path)
asked = {"name": name, "options": options, "command": command, "cwd": os.getcwd(), "env": dict(os.environ)}
here.sendall((json.dumps(asked) + "\n").encode())
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: here.sendall(f"{number}\n".encode()))
answer = json.loads(here.makefile().readline())
if answer["text"]:
    print(answer["text"])
sys.exit(answer["code"])
