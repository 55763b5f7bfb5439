"""An OpenAI-compatible server whose judge knows the answer, and that fails as real ones do (tests only)."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

KEY = "the-key-of-the-judge"


class JudgeServer(ThreadingHTTPServer):
    """Gives 1 where the response holds the reference answer and 0 where not. faults: what happens to the first requests
    for each response, in order, before it is answered; `always`: to all. seen: requests by their outcome. upstream:
    address of a real server, which is asked in place of the judge that knows; `key` is then its."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, faults: tuple[str, ...] = (), *, always: str = "", key: str = "", upstream: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults, self.always, self.key, self.upstream = faults, always, key, upstream
        self.seen: Counter[str] = Counter()
        self.tries: Counter[str] = Counter()
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is what the test wants."""

    def fault(self, content: str) -> str:
        """What happens to this request."""
        with self.lock:
            number = self.tries[content]
            self.tries[content] += 1
            # Not all responses meet the same fault first.
            faults = self.faults[sum(content.encode()) % len(self.faults) :] if self.faults else ()
            found = self.always or (faults[number] if number < len(faults) else "")
            self.seen[found or "answered"] += 1
            return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: JudgeServer

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        with self.server.lock:
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        try:
            self._answer()
        finally:
            with self.server.lock:
                self.server.now -= 1

    def _answer(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            return self._send(401, {"error": "no such key"})
        content = body["messages"][0]["content"]
        fault = self.server.fault(content)
        truth, _, response = content.partition("|")
        reply = f"I looked at it.\nScore: {float(response.strip().endswith(truth.strip()))}"
        if fault in ("500", "503"):
            return self._send(int(fault), {"error": "busy"})
        if fault == "429":
            return self._send(429, {"error": "too many"}, {"Retry-After": "0.3"})
        if fault == "silent":
            self.server.over.wait(30)
        elif fault == "cut":
            self.connection.shutdown(2)
        elif fault == "half":
            self.send_response(200)
            self.send_header("Content-Length", "500")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.wfile.flush()
            self.connection.shutdown(2)
        elif fault == "no json":
            self._send(200, "<html>gateway</html>")
        elif fault == "no score":
            self._send(200, _completion("I cannot tell."))
        elif fault == "score outside":
            self._send(200, _completion("Score: 7"))
        elif self.server.upstream:
            self._pass_on(body)
        else:
            self._send(200, _completion(reply))

    def _pass_on(self, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {self.server.key}"}
        try:
            given = httpx.post(
                f"{self.server.upstream}/chat/completions", json=body, headers=headers, timeout=120, trust_env=False
            )
        except httpx.TransportError:
            return self.connection.shutdown(2)
        self._send(given.status_code, given.text)

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        image = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(image)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(image)


def _completion(reply: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": reply}
    return {"choices": [{"message": message}], "usage": {"prompt_tokens": 20, "completion_tokens": 5}}


@contextmanager
def judge_server(*faults: str, **options: str) -> Iterator[JudgeServer]:
    """Runs a server as long as the block."""
    with JudgeServer(faults, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
