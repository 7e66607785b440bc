"""A TCP link of a given rate and delay, as a proxy in a process of its own: for machines whose kernel lacks `netem`.

    with shaped("127.0.0.1", 8000, rate=12.5e6, delay=0.01) as port: ...

Both directions have the rate, shared by all connections, and the one-way delay. What waits for the link is bounded, as
in a router with a buffer of 50 ms.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

_CHUNK = 1 << 16
_BUFFER = 0.05
"""Seconds of data that may wait."""


class _Direction:
    """One direction of the link: when the last byte that was sent leaves it."""

    def __init__(self, rate: float, delay: float):
        self._rate, self._delay = rate, delay
        self._free = 0.0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass everything on, late and in order; then the end."""
        underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = asyncio.create_task(self._deliver(underway, writer))
        clock = asyncio.get_running_loop().time
        try:
            while data := await reader.read(_CHUNK):
                await asyncio.sleep(self._free - clock() - _BUFFER)
                self._free = max(self._free, clock()) + len(data) / self._rate
                underway.put_nowait((self._free + self._delay, data))
        except ConnectionError:
            pass  # the other direction ends by itself
        underway.put_nowait((0.0, b""))
        await delivery

    async def _deliver(self, underway: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while True:
                when, data = await underway.get()
                if not data:
                    break
                await asyncio.sleep(when - clock())
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            return
        writer.close()


async def _serve(host: str, port: int, rate: float, delay: float, ready: Connection) -> None:
    up, down = _Direction(rate, delay), _Direction(rate, delay)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(up.carry(reader, back), down.carry(there, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    ready.send(server.sockets[0].getsockname()[1])
    async with server:
        await server.serve_forever()


def _run(host: str, port: int, rate: float, delay: float, ready: Connection) -> None:
    asyncio.run(_serve(host, port, rate, delay, ready))


@contextmanager
def shaped(host: str, port: int, rate: float, delay: float) -> Iterator[int]:
    """The port of a link to ``host``: bytes per second, and seconds in each direction."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=_run, args=(host, port, rate, delay, there), daemon=True
    )
    child.start()
    try:
        yield here.recv()
    finally:
        child.kill()
        child.join()
