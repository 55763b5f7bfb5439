"""Serves the page of runs that may go on: `python -m dapo.inspect RUN [RUN ...] --serve`. Only this machine can reach
it, only addresses with its token are answered, and it only reads."""

import hmac
import json
import secrets
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from dapo.ground.console import plain
from dapo.report.store.reader import Reader
from dapo.tools.inspect.groups import browser, whole
from dapo.tools.inspect.page import data, names, page
from dapo.tools.inspect.show import around

LOOPBACK = "127.0.0.1"
HOSTS = {LOOPBACK, "localhost"}  # a page elsewhere whose name leads here (DNS rebinding) sends another one
FOUND = 50  # answers of a run that a search shows
GROUPS_BYTES = 5_000_000
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page has the rest
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
Asked = Mapping[str, str]


class Server(ThreadingHTTPServer):
    """paths: of the runs, in the order of the page. port: 0 is a free one."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int = 0) -> None:
        self.paths = paths
        with ExitStack() as stack:
            self.names = names([stack.enter_context(Reader(path)) for path in paths])
        self.token = secrets.token_urlsafe(24)
        super().__init__((LOOPBACK, port), Handler)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # as of a browser that has gone
            super().handle_error(request, client_address)

    def open(self, asked: Asked) -> Reader:
        return Reader(self.paths[_number(asked, "run", len(self.paths) - 1)])


def _number(asked: Asked, name: str, most: int = 2**62) -> int:
    text = asked.get(name, "")
    if not text.isdecimal() or int(text) > most:
        raise ValueError(f"`{name}` ({text}) must be a whole number from 0 to {most}")
    return int(text)


def _page(server: Server, asked: Asked) -> str:
    return page([{"run": {"name": plain(name)}} for name in server.names], live=True)


def _data(server: Server, asked: Asked) -> Any:
    """Returns the data of a run and their stamp, or None if the stamp is `seen`."""
    with server.open(asked) as store:
        files = [store.path, store.path.with_name(f"{store.path.name}-wal")]
        stamp = str([(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists()])
        if stamp == asked.get("seen"):
            return None
        found = data(store, server.names[int(asked["run"])], 0) if store.steps() else None
    return {"stamp": stamp, "data": found}


def _groups(server: Server, asked: Asked) -> Any:
    with server.open(asked) as store:
        return browser(store, [_number(asked, "step")], GROUPS_BYTES)


def _group(server: Server, asked: Asked) -> Any:
    with server.open(asked) as store:
        return whole(store, _number(asked, "draw"))


def _search(server: Server, asked: Asked) -> Any:
    text = asked.get("text", "")
    with server.open(asked) as store:
        rows = store.search(text, FOUND) if text else []
    return [
        {name: row[name] for name in ("step", "draw", "sample", "accuracy", "reward", "tokens", "fate")}
        | {"where": plain(around(row["text"], text))}
        for row in rows
    ]


ANSWERS: dict[str, Callable[[Server, Asked], Any]] = {
    "": _page,
    "data": _data,
    "groups": _groups,
    "group": _group,
    "search": _search,
}


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 60.0

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        _, token, question = (*path.split("/", 2), "", "")[:3]
        host = self.headers.get("Host", "").rpartition(":")
        known = hmac.compare_digest(token.encode(), self.server.token.encode())
        if not known or (host[0] or host[2]) not in HOSTS:
            return self._send(HTTPStatus.FORBIDDEN, {"error": "open the address that the command has printed"})
        if question not in ANSWERS:
            return self._send(HTTPStatus.NOT_FOUND, {"error": "there is nothing here"})
        try:
            found = ANSWERS[question](self.server, dict(parse_qsl(query)))
        except ValueError as error:
            return self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except (sqlite3.Error, OSError) as error:
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"error": f"the store cannot be read ({error})"})
        self._send(HTTPStatus.OK if found is not None else HTTPStatus.NO_CONTENT, found)

    def _send(self, status: HTTPStatus, found: Any) -> None:
        kind = "text/html" if isinstance(found, str) else "application/json"
        body = b"" if found is None else (found if isinstance(found, str) else json.dumps(found)).encode("ascii")
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status is not HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not printed: an address has the token."""


def serve(paths: Sequence[Path], port: int) -> None:
    """Serves until Ctrl-C. Raises ValueError if a run or the port cannot be used."""
    try:
        server = Server(paths, port)
    except (OSError, OverflowError) as error:
        raise ValueError(f"`--port` ({port}) cannot be used ({error}); leave it out for a free one") from error
    with server:
        print(server.address)
        print("This address opens on this machine only; keep it to yourself. Ctrl-C ends it.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
