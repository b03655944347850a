"""A line between a client and its server that a test can cut, mend, and let stand still: a TCP relay on loopback.

It passes bytes on and knows nothing of them. Leaving the block closes every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

CHUNK = 65_536


class CutLine:
    """Relays to `endpoint`, HOST:PORT. Whole until it is cut."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._peer = (host, int(port))
        self._open: set[asyncio.StreamWriter] = set()
        self._moving = asyncio.Event()
        self._moving.set()
        self._answering = asyncio.Event()
        self._answering.set()
        self._whole = True
        self.endpoint = ""
        """Where the client is to connect."""

    def cut(self) -> None:
        """Every connection is gone, and none can be made."""
        self._whole = False
        for writer in self._open:
            writer.transport.abort()

    def mend(self) -> None:
        self._whole = True

    def stand_still(self) -> None:
        """Connections stay, and nothing moves on them until `move`."""
        self._moving.clear()

    def withhold_answers(self) -> None:
        """What the client says arrives, and no answer comes back until `move`."""
        self._answering.clear()

    def move(self) -> None:
        self._moving.set()
        self._answering.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the client."""
        if not self._whole:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(*self._peer)
        both = (writer, far_writer)
        self._open.update(both)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer, ()))
                group.create_task(self._pump(far_reader, writer, (self._answering,)))
        finally:
            self._open.difference_update(both)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, also: tuple[asyncio.Event, ...]
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(CHUNK):
                for gate in (self._moving, *also):
                    await gate.wait()
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


@asynccontextmanager
async def cut_line(endpoint: str) -> AsyncIterator[CutLine]:
    """A line to `endpoint`, on a free port."""
    line = CutLine(endpoint)
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    line.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        try:
            yield line
        finally:
            line.move()
            line.cut()
