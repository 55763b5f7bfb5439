"""`dapo leave --watch`: stand-ins for the clouds' metadata. With Ray: end_to_end/faults/test_leave.py."""

import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dapo.tools import leave

IN_S = 90
POLLS = ["none", "refused", "expired", "garbage", "other", "broken", "silence", "none", "notice"]
TOKEN, NAME = "/latest/api/token", "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
AWS, AZURE = "/latest/meta-data/spot/instance-action", "/metadata/scheduledevents?api-version=2020-07-01"
GCP = "/computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec=0.01"


def azure_event(kind: str, machine: str, at: str) -> dict[str, object]:
    status = "Scheduled" if at else "Started"
    return {"EventType": kind, "Resources": [machine], "EventStatus": status, "NotBefore": at}


class Metadata(ThreadingHTTPServer):
    """polls: what one poll after the other meets. events: those of Azure. header: without which it refuses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        at = datetime.now(UTC) + timedelta(seconds=IN_S)
        http = format_datetime(at, usegmt=True)
        self.polls = [*POLLS]
        self.aws = json.dumps({"action": "terminate", "time": f"{at:%Y-%m-%dT%H:%M:%SZ}"})
        self.events = [
            azure_event("Freeze", "vm_0", http),
            azure_event("Preempt", "vm_1", ""),
            azure_event("Preempt", "vm_0", http),
        ]
        self.over = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that waits no longer is what the test wants."""

    def answer(self, method: str, path: str, header: dict[str, str]) -> tuple[int, str]:
        if path == TOKEN:
            if self.polls[:1] == ["refused"]:
                self.polls.pop(0)
                return 403, ""
            return (
                (200, "token") if method == "PUT" and header.get("x-aws-ec2-metadata-token-ttl-seconds") else (400, "")
            )
        if path == NAME:
            return (200, "vm_0") if header.get("metadata") == "true" else (400, "")
        poll = self.polls.pop(0)
        if poll == "silence":
            self.over.wait(10)
        if poll in ("refused", "expired"):
            return 401, ""
        if poll in ("garbage", "other"):
            return 200, "<html>sign in</html>" if poll == "garbage" else '{"another": "form"}'
        if path == AWS and header.get("x-aws-ec2-metadata-token") == "token":
            return (404, "<h1>404 - Not Found</h1>") if poll == "none" else (200, self.aws)
        if path == GCP and header.get("metadata-flavor") == "Google":
            return 200, "FALSE" if poll == "none" else "TRUE\n"
        if path == AZURE and header.get("metadata") == "true":
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": [] if poll == "none" else self.events})
        return 400, ""


class Handler(BaseHTTPRequestHandler):
    server: Metadata

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.server.polls[:1] == ["broken"] and self.path != TOKEN:
            self.server.polls.pop(0)
            self.wfile.write(b"not HTTP\r\n")
            return
        code, text = self.server.answer(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_PUT = do_GET


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    """Polls come at once; a proxy is never asked."""
    server = Metadata()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(leave, "POLL_S", 0.01)
    monkeypatch.setattr(leave, "REQUEST_S", 0.3)
    monkeypatch.setenv("DAPO_METADATA_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("cloud", "notice_s"), [("aws", IN_S), ("gcp", 30), ("azure", IN_S)])
def test_a_notice_is_passed_on_with_its_time_after_failed_polls_and_a_silent_ray(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cloud: str, notice_s: int
) -> None:
    metadata.polls += ["notice"]
    told: list[float] = []

    def tell(seconds: float) -> list[str]:
        told.append(seconds)
        if len(told) == 1:
            raise ConnectionError("no Ray")
        return ["0123456789"]

    monkeypatch.setattr(leave, "tell_going", tell)
    leave.main(["--watch", cloud])
    assert metadata.polls == [] and len(told) == 2
    assert all(notice_s - 10 < seconds <= notice_s for seconds in told)
    out, warned = capsys.readouterr()
    assert out.startswith("Ray was told that this node goes in ") and "(012345)" in out
    kinds = [line.split(f"`dapo leave --watch {cloud}` tries again every 0.01 s: ")[1] for line in warned.splitlines()]
    assert "no Ray" in kinds[-1] and len(kinds) == len({*kinds}) >= 5


def test_a_failure_that_repeats_is_told_once(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata.polls = ["garbage"] * 20 + ["notice"]
    monkeypatch.setattr(leave, "tell_going", lambda seconds: ["0123456789"])
    leave.watch("gcp")
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("event", "seconds"),
    [
        pytest.param(("Preempt", "vm_0", ""), 0.0, id="it has begun"),
        pytest.param(("Terminate", "vm_0", "Mon, 19 Sep 2016 18:29:47 GMT"), 0.0, id="its time is over"),
        pytest.param(("Preempt", "vm_1", ""), None, id="another machine"),
        pytest.param(("Freeze", "vm_0", ""), None, id="only a pause"),
    ],
)
def test_events_of_azure(metadata: Metadata, event: tuple[str, str, str], seconds: float | None) -> None:
    metadata.polls, metadata.events = ["notice"], [azure_event(*event)]
    at = leave.azure()
    assert at is None if seconds is None else at is not None and at <= time.time()
