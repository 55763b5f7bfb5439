"""A slow link: TCP connections are forwarded, with a delay and a shared rate each way. It is in user space, because
kernels of test machines may lack netem."""

import asyncio
import threading
from collections.abc import Mapping
from contextlib import suppress

CHUNK_BYTES = 1 << 14


class SlowLink(threading.Thread):
    """Forwards from ports of `host` to ports of this machine. carried: bytes so far, by port of this machine."""

    def __init__(self, host: str, ports: Mapping[int, int], *, bits_per_s: float, delay_s: float) -> None:
        super().__init__(daemon=True)
        self._host, self._ports = host, ports
        self._bytes_per_s, self._delay_s = bits_per_s / 8, delay_s
        self._free = {True: 0.0, False: 0.0}  # when each direction has sent what it has taken
        self.carried = dict.fromkeys(ports.values(), 0)
        self.ready = threading.Event()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        async def forward(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                there = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(
                    self._one_way(True, reader, there[1], port), self._one_way(False, there[0], writer, port)
                )
            writer.close()

        for near, far in self._ports.items():
            await asyncio.start_server(lambda r, w, port=far: forward(port, r, w), self._host, near)
        self.ready.set()
        await asyncio.Event().wait()

    async def _one_way(self, up: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)

        async def arrive() -> None:
            while (item := await queue.get())[1]:
                await asyncio.sleep(item[0] - loop.time())
                writer.write(item[1])
                await writer.drain()
            writer.close()

        arriving = asyncio.create_task(arrive())
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                self._free[up] = max(self._free[up], loop.time()) + len(data) / self._bytes_per_s
                self.carried[port] += len(data)
                await queue.put((self._free[up] + self._delay_s, data))
        await queue.put((0.0, b""))
        with suppress(OSError):
            await arriving
