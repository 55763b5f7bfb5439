"""A judge as a run starts it: vLLM's own server with the tiny base model, kept by an event loop in a thread."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dapo.config.reward import JudgeConfig, JudgeEngineConfig
from dapo.workers.judge import server_arguments
from dapo.workers.judging.server import Server
from dapo.workers.placement import vllm_environment

START_S = 600.0  # on a machine that others keep busy
ENGINE = JudgeEngineConfig(
    path="pkg://dapo.tiny/base", vllm={"max_model_len": 512, "max_num_seqs": 32}, silence_s=300.0
)
# The judge adds up what the response holds: its score is the sum that the model finds.
SUMS = JudgeConfig(
    engine=ENGINE, prompt="{response}", pattern=r"Answer: (\d+)", highest=1e9, max_tokens=64, prompt_cost=2.0
)


class KeptServer:
    """Runs coroutines of the server on its own loop."""

    def __init__(self, server: Server, call: Callable[[Any], Any]) -> None:
        self.server, self.call = server, call


@contextmanager
def kept_judge(**options: Any) -> Iterator[KeptServer]:
    """Starts a server for as long as the block lasts. options: of `Server`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(START_S + 60)

    async def make() -> Server:
        return Server(server_arguments(ENGINE, "cpu"), "127.0.0.1", **{"silence_s": 300.0, **options})

    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_environment("cpu", 1).items():
            patch.setenv(name, value)
        server = call(make())

        async def end() -> None:
            """Lets all tasks unwind: a loop that is only stopped leaves them to the garbage collector, once it is
            closed."""
            for task in (others := asyncio.all_tasks() - {asyncio.current_task()}):
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            server.kill()

        try:
            call(server.start(START_S))
            yield KeptServer(server, call)
        finally:
            call(end())
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
