"""A program in place of vLLM's server that starts in no time and fails as it is told to by files in its folder."""

from pathlib import Path

import pytest

from workers.judging import server as module

PROGRAM = """
import http.server, os, subprocess, sys, threading
from pathlib import Path

folder, port = Path(sys.argv[1]), int(sys.argv[sys.argv.index("--port") + 1])
count = len(list(folder.glob("start*")))
(folder / f"start{count}").write_text(os.environ["VLLM_API_KEY"])
if (folder / "chatty").exists():
    for _ in range(256):
        print("x" * 65535, flush=True)
if (folder / "broken").exists():
    sys.exit("Traceback\\nValueError: no such model")
engine = subprocess.Popen(["sleep", "600"])
(folder / "engine").write_text(str(engine.pid))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers["Authorization"] == "Bearer " + os.environ["VLLM_API_KEY"]
        status = int((folder / "status").read_text()) if (folder / "status").exists() else 200
        self.send_response(status if key else 401)
        self.end_headers()
    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(module, "PROGRAM", (str(tmp_path / "program.py"), str(tmp_path)))
    monkeypatch.setattr(module, "PROBE_S", 0.1)
    return tmp_path
