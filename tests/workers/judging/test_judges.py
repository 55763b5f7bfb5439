"""How judges are watched and replaced, and the driver's side of them, without Ray and vLLM. Actors are in this process.
A program in place of vLLM's server starts in no time and fails as files in its folder tell it to."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.exceptions import RayActorError

from dapo.config.reward import JudgeEngineConfig
from dapo.config.schema import Config
from dapo.workers import judge, supervise
from dapo.workers.judge import JudgePool, server_arguments
from dapo.workers.judging import server as serving
from dapo.workers.judging.server import Server
from dapo.workers.placing.asked import count_gpus, pools
from dapo.workers.remote import RemoteError

PROGRAM = """
import http.server, os, subprocess, sys
from pathlib import Path

folder, port = Path(sys.argv[1]), int(sys.argv[sys.argv.index("--port") + 1])
(folder / f"start{len(list(folder.glob('start*')))}").write_text(os.environ["VLLM_API_KEY"])
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
    monkeypatch.setattr(serving, "PROGRAM", (str(tmp_path / "program.py"), str(tmp_path)))
    monkeypatch.setattr(serving, "PROBE_S", 0.1)
    return tmp_path


async def until(holds: Any) -> None:
    while not holds():
        await asyncio.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def serve(use: Any) -> None:
    """Starts a server and uses it."""

    async def whole() -> None:
        server = Server([], "127.0.0.1", silence_s=60.0)
        try:
            await server.start(60)
            async with asyncio.timeout(120):
                await use(server)
        finally:
            server.kill()

    asyncio.run(whole())


def test_a_server_that_ends_is_lost_with_its_engine(program: Path) -> None:
    def engine() -> int:
        return int((program / "engine").read_text())

    async def use(server: Server) -> None:
        await server.check(now=True)
        assert not gone(engine())
        os.kill(server.pid, signal.SIGKILL)
        for now in (False, True):
            with pytest.raises(RuntimeError, match="its process ended .exit status -9"):
                await server.check(now=now)
        await until(lambda: gone(engine()))

    serve(use)


def test_a_server_whose_engine_fails_is_lost(program: Path) -> None:
    async def use(server: Server) -> None:
        (program / "status").write_text("500")
        with pytest.raises(RuntimeError, match="it answered 500"):
            await server.check(now=False)
        assert not server.pid

    serve(use)


def test_output_never_holds_a_server_up_and_nothing_stays_open(program: Path) -> None:
    (program / "chatty").touch()

    async def use(server: Server) -> None:
        assert os.stat(f"/proc/{server.pid}/fd/1").st_size < 1e6  # of 16 MiB

    before = len(os.listdir("/proc/self/fd"))
    serve(use)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("file", "text", "timeout_s", "reason"),
    [
        ("status", "400", 60, "refuses a plain conversation .status 400."),
        ("status", "503", 1, "did not answer within 1 s"),
        ("broken", "", 60, "its process ended .exit status 1.: ValueError: no such model"),
    ],
)
def test_a_server_that_does_not_start_is_an_error_with_the_reason(program: Path, file, text, timeout_s, reason) -> None:
    async def start() -> None:
        await Server([], "127.0.0.1", silence_s=60.0).start(timeout_s)

    (program / file).write_text(text)
    with pytest.raises(RuntimeError, match=reason):
        asyncio.run(asyncio.wait_for(start(), 60))


class LocalActor:
    """Has the methods of an actor's handle; `kill` ends it as Ray does, with what it has started."""

    def __init__(self, kind: type) -> None:
        self.held, self.dead = kind(), False

    def __getattr__(self, name: str) -> Any:
        class Call:
            @staticmethod
            def remote(*arguments: Any, **named: Any) -> Any:
                return asyncio.ensure_future(self.answer(getattr(self.held, name)(*arguments, **named)))

        return Call

    async def answer(self, work: Any) -> Any:
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait({task}, timeout=0.02)
            if self.dead:
                task.cancel()
                raise RayActorError()
        if self.dead:
            raise RayActorError()
        try:
            return task.result()
        except RuntimeError as error:  # as `workers.remote.wait` makes of Ray's
            raise RemoteError(str(error)) from error

    def kill(self) -> None:
        self.dead = True
        self.held._server.kill()

    def signal(self, number: int) -> None:
        os.kill(self.held._server.pid, number)


@pytest.fixture
def pool(program: Path, monkeypatch: pytest.MonkeyPatch) -> JudgePool:
    """Two judges; `warnings` is what it said."""

    class Remote:
        def __init__(self, kind: type) -> None:
            self.remote = lambda: LocalActor(kind)
            self.options = lambda **_: self

    monkeypatch.setattr(judge.ray, "remote", Remote)
    monkeypatch.setattr(supervise, "_kill", lambda handle: handle.kill())
    monkeypatch.setattr(judge.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(supervise, "PAUSE_S", 0.05)
    warnings: list[str] = []
    config = JudgeEngineConfig(path="judge", max_restarts=2)
    made = JudgePool(config, [{}, {}], device="cpu", warn=warnings.append)
    made.warnings = warnings  # type: ignore[attr-defined]
    return made


def run(pool: Any, use: Any) -> None:
    async def whole() -> None:
        try:
            async with asyncio.timeout(120):
                await pool.start(60)
                await use(*[each.handle for each in pool._workers.all])
        finally:
            pool.stop()

    asyncio.run(whole())


def test_a_server_that_is_lost_leaves_the_other_and_comes_back(pool: Any) -> None:
    async def use(first: Any, second: Any) -> None:
        both = pool.servers()
        assert len({server["url"] for server in both}) == len({server["key"] for server in both}) == 2
        first.signal(signal.SIGKILL)
        await until(lambda: pool.servers() == both[1:])
        await until(lambda: len(pool.servers()) == 2)
        new, other = pool.servers()
        assert other == both[1] and new["key"] != both[0]["key"]
        assert (both[0]["start"], new["start"]) == ("0", "1") and pool.restarts == 1 and not pool.failure
        [warning] = pool.warnings
        assert warning.startswith("judge 0 is lost: ") and "its process ended (exit status -9)" in warning

    run(pool, use)


def test_an_actor_that_is_lost_is_replaced(pool: Any) -> None:
    async def use(first: Any, second: Any) -> None:
        both = pool.servers()
        second.kill()
        await until(lambda: pool.restarts == 1 and len(pool.servers()) == 2)
        assert pool.servers()[0] == both[0] and pool.servers()[1]["key"] != both[1]["key"]
        assert "judge 1 is lost" in pool.warnings[0]

    run(pool, use)


@pytest.mark.parametrize("lost", ["actors", "servers"])
def test_who_asks_while_no_judge_serves_waits_for_one(pool: Any, lost: str) -> None:
    async def use(*handles: Any) -> None:
        for handle in handles:
            handle.kill() if lost == "actors" else handle.signal(signal.SIGKILL)
        await until(lambda: pool.servers() == [])
        found, *others = await asyncio.gather(*[pool.there() for _ in range(3)])
        assert found and others == [found] * 2
        assert all(server["start"] == "1" for server in found)

    run(pool, use)


def test_who_was_not_answered_hears_whether_the_judges_stand_still(pool: Any) -> None:
    pool._config.silence_s = 2.0

    async def use(first: Any, second: Any) -> None:
        before = pool.servers()
        await pool.heard()
        assert pool.servers() == before and pool.restarts == 0
        first.signal(signal.SIGSTOP)
        await pool.heard()
        await until(lambda: len(pool.servers()) == 2)
        assert pool.restarts == 1

    run(pool, use)


def test_a_judge_that_is_given_up_is_heard_of_and_ends_the_run_if_no_other_is_left(pool: Any) -> None:
    async def use() -> None:
        first, second = pool._workers.all
        await pool.heard()  # of judges that load nothing is to be heard
        pool._give_up(first, "lost too often")
        assert not pool.failure
        pool._give_up(second, "lost too often")
        assert "no judge is left" in pool.failure and await pool.there() == []

    asyncio.run(asyncio.wait_for(use(), 60))


def test_the_run_ends_where_no_judge_is_left(pool: Any, program: Path) -> None:
    async def use(first: Any, second: Any) -> None:
        (program / "broken").touch()
        first.signal(signal.SIGKILL)
        await until(lambda: 0 in pool._given_up)
        assert not pool.failure and len(pool.servers()) == 1
        second.kill()
        await until(lambda: bool(pool.failure))
        assert "no judge is left (`reward.judge.engine`)" in pool.failure and "no such model" in pool.failure

    run(pool, use)


def test_judges_that_do_not_start_are_an_error_with_the_reason(pool: Any, program: Path) -> None:
    (program / "broken").touch()
    with pytest.raises(RemoteError, match="no such model"):
        run(pool, None)


def test_arguments_of_the_server() -> None:
    vllm = {"max_model_len": 512, "enforce_eager": False, "override_generation_config": {"top_k": 1}, "seed": None}
    assert server_arguments(JudgeEngineConfig(path="owner/judge", vllm=vllm), "cpu") == [
        *("--model", "owner/judge"),
        *("--load-format=safetensors", "--no-trust-remote-code", "--dtype=float32", "--no-enforce-eager"),
        *("--max-model-len=512", '--override-generation-config={"top_k": 1}'),
    ]
    assert server_arguments(JudgeEngineConfig(path="j", trust_remote_code=True), "cuda") == [
        *("--model", "j", "--load-format=safetensors", "--trust-remote-code")
    ]


def test_gpus_of_judges_are_counted() -> None:
    cfg = Config()
    without = count_gpus(cfg, "cuda")
    cfg.reward.judge.engine = JudgeEngineConfig(path="judge", num_engines=2, vllm={"tensor_parallel_size": 4})
    assert count_gpus(cfg, "cuda") == without + 8 and count_gpus(cfg, "cpu") == 0
    assert [pool.gpus for pool in pools(cfg, "cuda") if pool.name == "judges"] == [4]
    cfg.reward.judge.engine.device = "cpu"
    assert count_gpus(cfg, "cuda") == without
