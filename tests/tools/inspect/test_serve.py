"""The server of the page: this machine only, with its token, read only; and what it tells of a run that goes on."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo.config.schema import LoggingConfig
from dapo.report.store.samples import SampleStore
from dapo.tools.inspect.__main__ import main
from dapo.tools.inspect.serve import Server
from tests.support.report.shown_run import make_run

HOSTILE = "</script><b>\x1b[2J\x00"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves a run of three steps, and one without a step that has the same name."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        (folder / name / "run").mkdir(parents=True)
    make_run(folder / "a/run", 3, n=4, text=lambda draw, sample: f"{HOSTILE} number {draw}-{sample}" + "x" * 20_000)
    store = SampleStore(folder / "b/run", LoggingConfig(), warn=pytest.fail)
    store.begin({})
    store.close()
    with Server([folder / "a/run", folder / "b/run"]) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def asked(server: Server, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def told(server: Server, question: str) -> Any:
    status, _, body = asked(server, f"/{server.token}/{question}")
    assert status == 200, body
    return json.loads(body)


def test_only_this_machine_with_the_token_is_answered(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1" and len(server.token) >= 32
    whole = f"/{server.token}/"
    for path, host in [
        ("/", None),
        ("/wrong/", None),
        (f"/{server.token[:-1]}/data?run=0", None),
        ("//[", None),
        (whole, "evil.example"),
        (whole, f"evil.example:{server.server_port}"),
    ]:
        status, _, body = asked(server, path, host=host)
        assert (status, b"run" in body) == (403, False), path
    for host in (None, "localhost:8000", "127.0.0.1"):  # a tunnel may begin at another port
        assert asked(server, whole, host=host)[0] == 200
    for path in ("samples.sqlite", "../", "assets/page.css", "data/"):
        assert asked(server, whole + path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert asked(server, whole, method)[0] == 501, method


def test_the_page_asks_only_its_server_and_no_other_page_may_hold_it(server: Server) -> None:
    _, headers, body = asked(server, f"/{server.token}/")
    page = body.decode("ascii")
    assert "connect-src 'self';" in page and "unsafe" not in page.partition("<title>")[0]
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'" and headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer" and headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers
    assert HOSTILE[:9] not in page.partition('id="data"')[2].partition("</script>")[0]


def test_data_come_once_until_the_run_writes(server: Server) -> None:
    found = told(server, "data?run=0")
    assert found["data"]["run"]["name"] == "a/run" and found["data"]["steps"] == [1, 2, 3]
    assert not found["data"]["groups"], "they are asked for"
    status, headers, body = asked(server, f"/{server.token}/data?run=0&seen=" + found["stamp"].replace(" ", "%20"))
    assert (status, body) == (204, b"")
    assert told(server, "data?run=1")["data"] is None, "no step yet"
    store = SampleStore(server.paths[0], LoggingConfig(), warn=pytest.fail)
    store.event("warning", "later")
    store.flush()
    later = told(server, "data?run=0&seen=" + found["stamp"].replace(" ", "%20"))
    assert later["data"]["events"][0][3] == "later"
    store.close()


def test_every_answer_of_the_store_is_found_and_shown_whole(server: Server) -> None:
    [hit] = told(server, "search?run=0&text=NUMBER%204-2")
    assert (hit["draw"], hit["sample"]) == (4, 2) and "number 4-2" in hit["where"]
    assert "\x1b" not in hit["where"] and told(server, "search?run=0&text=") == []
    assert told(server, "search?run=1&text=number") == []
    sides = told(server, f"group?run=0&draw={hit['draw']}")["sides"]
    assert [len(side["answers"]) for side in sides] == [side["all"] for side in sides] and sum(
        side["all"] for side in sides
    ) == 4
    assert {group["step"] for group in told(server, "groups?run=0&step=2")} == {2}
    assert told(server, "groups?run=0&step=99") == []
    for question in ("data?run=2", "data?run=-1", "data", "groups?run=0&step=x", "group?run=0&draw=1e9"):
        status, _, body = asked(server, f"/{server.token}/{question}")
        assert status == 400 and "must be a whole number" in json.loads(body)["error"], question


def test_a_run_or_port_that_cannot_be_used(server: Server, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not there; give"):
        main([str(tmp_path), "--serve"])
    for port in (server.server_port, 70_000):
        with pytest.raises(SystemExit, match=f"`--port` \\({port}\\) cannot be used"):
            main([str(server.paths[0]), "--serve", "--port", str(port)])
