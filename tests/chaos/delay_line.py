"""A line from one party to an address of another that can be slow: a TCP relay inside the party's network.

It passes bytes on, each piece no earlier than the delay after it came, and knows nothing of them. Invariant: a
connection that either side closes is closed at the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from tests.chaos.network import LOOPBACK, Network

CHUNK: Final = 65_536
CONNECT_S: Final = 5.0
PIECES: Final = 256
"""On the way at once; more wait at the sender."""


class DelayLine:
    """From `party` to `target`, HOST:PORT. Without delay until it is told otherwise."""

    def __init__(self, network: Network, party: str, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._network: Final = network
        self._party: Final = party
        self._target: Final = (host, int(port))
        self._tasks: Final[set[asyncio.Task[None]]] = set()
        self.delay_s = 0.0
        self.endpoint = ""
        """Where the party is to connect."""

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the party."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        sock = self._network.socket(self._party)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(sock, self._target)
            far_reader, far_writer = await asyncio.open_connection(sock=sock)
        except (OSError, TimeoutError):
            sock.close()
            writer.transport.abort()
            return
        both = (
            asyncio.create_task(self._carry(reader, far_writer)),
            asyncio.create_task(self._carry(far_reader, writer)),
        )
        try:
            with contextlib.suppress(asyncio.CancelledError):  # by `close`; the server would log it
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in both:
                one.cancel()
            writer.transport.abort()
            far_writer.transport.abort()

    def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES)

        async def take() -> None:
            while data := await source.read(CHUNK):
                await pieces.put((loop.time() + self.delay_s, data))
            await pieces.put((loop.time() + self.delay_s, b""))

        taking = asyncio.create_task(take())
        try:
            with contextlib.suppress(ConnectionError):
                while True:
                    due_s, data = await pieces.get()
                    if (wait_s := due_s - loop.time()) > 0:
                        await asyncio.sleep(wait_s)
                    if not data:
                        return
                    sink.write(data)
                    await sink.drain()
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)


@asynccontextmanager
async def delay_line(network: Network, party: str, target: str) -> AsyncIterator[DelayLine]:
    """A line that exists while the block lasts."""
    line = DelayLine(network, party, target)
    listener = network.socket(party)
    listener.bind((LOOPBACK, 0))
    listener.listen()
    server = await asyncio.start_server(line.accept, sock=listener)
    line.endpoint = f"{LOOPBACK}:{listener.getsockname()[1]}"
    try:
        yield line
    finally:
        server.close()
        line.close()
