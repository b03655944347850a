"""One write and one read on each peer, in the least that its protocol allows; and how each is started and stopped.

etcd is spoken to in bytes of its own messages, Redis in RESP, Mooncake through its own client in a process of its own.
Nothing is measured here. Whoever is not installed raises NotInstalled, saying what to install.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol

import grpc.aio
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_channel import CLIENT_OPTIONS
from kvlease.registry.values import Hit
from kvlease.registry.wire_answers import varint
from kvlease.registry.wire_resolve import encode_query
from kvlease.v1 import registry_pb2 as pb
from kvlease.v1.registry_pb2_grpc import RegistryStub

from tests.bench.lenders import Lender
from tests.bench.payloads import Turn, engine
from tests.bench.registry_sections import port_of
from tests.bench.served import Program
from tests.bench.wire import AnswerTooShort

START_S: Final = 20.0
TTL_S: Final = 480
CALL_S: Final = 10.0
MOONCAKE_PYTHON: Final = "KVLEASE_BENCH_MOONCAKE_PYTHON"
"""Names a Python that has mooncake-transfer-engine-non-cuda; it needs no package of ours."""


class NotInstalled(RuntimeError):
    """The peer is not here; the message says how to get it."""


class Peer(Protocol):
    """A place to keep where KV is."""

    name: str

    async def publish(self, turn: Turn, payload: bytes) -> None:
        """Keep `payload`, a serialised PublishItem, under the lease's id."""
        ...

    async def resolve(self, turn: Turn, least_bytes: int) -> None:
        """Read it again. Raises AnswerTooShort if less comes back."""
        ...


class _Unary:
    """kvlease by calls, one lease or one question each."""

    name = "kvlease, unary"

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Final = RegistryStub(channel)
        self._engine: Final = engine("lender-1", seed=1)

    async def publish(self, turn: Turn, payload: bytes) -> None:
        request = pb.PublishRequest(engine_id=self._engine.engine_id, incarnation=self._engine.incarnation)
        request.leases.add().ParseFromString(payload)
        response = await self._stub.Publish(request, timeout=CALL_S)
        if response.results[0].status != pb.PUBLISH_STATUS_PUBLISHED:
            raise AnswerTooShort(f"not published: {response.results[0].message}")

    async def resolve(self, turn: Turn, least_bytes: int) -> None:
        response = await self._stub.Resolve(encode_query(turn.query), timeout=CALL_S)
        _check(response.hit.record.ByteSize() + 200, least_bytes)


class _Streamed:
    """kvlease as its own client and lender do it."""

    name = "kvlease, stream"

    def __init__(self, client: RegistryClient, lender: Lender) -> None:
        self._client: Final = client
        self._lender: Final = lender

    async def publish(self, turn: Turn, payload: bytes) -> None:
        await self._lender.publish([turn.publication])

    async def resolve(self, turn: Turn, least_bytes: int) -> None:
        answer = await self._client.resolve(turn.query, timeout_ms=10_000)
        if not isinstance(answer, Hit):
            raise AnswerTooShort(f"not found: {answer}")


class _Etcd:
    name = "etcd"

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._put: Final = _unary(channel, "/etcdserverpb.KV/Put")
        self._range: Final = _unary(channel, "/etcdserverpb.KV/Range")
        self._grant: Final = _unary(channel, "/etcdserverpb.Lease/LeaseGrant")
        self._lease = b""

    async def open(self) -> None:
        """One lease for all keys, as a lender would have: its grant is not part of a publish."""
        granted = await self._grant(b"\x08" + varint(TTL_S), timeout=CALL_S)
        # LeaseGrantResponse: header = 1, then ID = 2 as a varint.
        header = 2 + granted[1]
        self._lease = granted[header + 1 :].split(b"\x18")[0]

    async def publish(self, turn: Turn, payload: bytes) -> None:
        key = turn.publication.lease_id.encode()
        request = b"\x0a" + varint(len(key)) + key + b"\x12" + varint(len(payload)) + payload + b"\x18" + self._lease
        await self._put(request, timeout=CALL_S)

    async def resolve(self, turn: Turn, least_bytes: int) -> None:
        key = turn.publication.lease_id.encode()
        _check(len(await self._range(b"\x0a" + varint(len(key)) + key, timeout=CALL_S)), least_bytes)


class _Redis:
    """As many connections as there are callers at once; each carries one command at a time."""

    name = "Redis"

    def __init__(self, port: int) -> None:
        self._port: Final = port
        self._free: Final[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = []

    async def publish(self, turn: Turn, payload: bytes) -> None:
        key = turn.publication.lease_id.encode()
        _check(len(await self._ask(b"SET", key, payload, b"EX", str(TTL_S).encode())), 2)

    async def resolve(self, turn: Turn, least_bytes: int) -> None:
        _check(len(await self._ask(b"GET", turn.publication.lease_id.encode())), least_bytes)

    def close(self) -> None:
        for _, writer in self._free:
            writer.close()

    async def _ask(self, *words: bytes) -> bytes:
        reader, writer = self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
        async with asyncio.timeout(CALL_S):
            head = await reader.readuntil(b"\r\n")
            if head[:1] == b"$":
                answer = (await reader.readexactly(int(head[1:]) + 2))[:-2] if head[1:2] != b"-" else b""
            else:
                answer = head[1:-2]
        self._free.append((reader, writer))
        return answer


class _Mooncake:
    """Its client, in its own Python: a command a line to it, an answer a line back, so one call at a time."""

    name = "Mooncake"

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process: Final = process
        self._turn: Final = asyncio.Lock()

    async def publish(self, turn: Turn, payload: bytes) -> None:
        await self._ask(f"put {turn.publication.lease_id} {len(payload)}")

    async def resolve(self, turn: Turn, least_bytes: int) -> None:
        await self._ask(f"get {turn.publication.lease_id}")

    async def _ask(self, command: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._turn, asyncio.timeout(CALL_S):
            self._process.stdin.write(command.encode() + b"\n")
            while (line := await self._process.stdout.readline()) and not line.startswith(b"@"):
                pass
        if line.strip() != b"@ok":
            raise AnswerTooShort(f"Mooncake: {command.split()[0]} gave {line!r}")


@asynccontextmanager
async def kvlease() -> AsyncIterator[Peer]:
    async with _registry() as channel, RegistryClient(channel[1]) as client, Lender(client, engine("lender-1", seed=1)):
        yield _Unary(channel[0])


@asynccontextmanager
async def kvlease_stream() -> AsyncIterator[Peer]:
    lender = engine("lender-1", seed=1)
    async with _registry() as channel, RegistryClient(channel[1]) as client, Lender(client, lender) as session:
        yield _Streamed(client, session)


@asynccontextmanager
async def _registry() -> AsyncIterator[tuple[grpc.aio.Channel, str]]:
    async with Program("tests.bench.registry_server") as program:
        address = f"127.0.0.1:{await port_of(program)}"
        async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
            yield channel, address


@asynccontextmanager
async def etcd() -> AsyncIterator[Peer]:
    client, peer = _free_port(), _free_port()
    with tempfile.TemporaryDirectory() as folder:
        here, there = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        arguments = (
            *("--data-dir", folder, "--log-level", "error"),
            *("--listen-client-urls", here, "--advertise-client-urls", here),
            *("--listen-peer-urls", there, "--initial-advertise-peer-urls", there),
            *("--initial-cluster", f"default={there}"),
        )
        async with (
            _process("etcd", arguments, client, "etcd-server (Debian)"),
            grpc.aio.insecure_channel(f"127.0.0.1:{client}", options=CLIENT_OPTIONS) as channel,
        ):
            found = _Etcd(channel)
            await found.open()
            yield found


@asynccontextmanager
async def redis() -> AsyncIterator[Peer]:
    port = _free_port()
    arguments = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    async with _process("redis-server", arguments, port, "redis-server (Debian)"):
        found = _Redis(port)
        try:
            yield found
        finally:
            found.close()


@asynccontextmanager
async def mooncake() -> AsyncIterator[Peer]:
    python = os.environ.get(MOONCAKE_PYTHON, "")
    if not shutil.which(python):
        raise NotInstalled(f"{MOONCAKE_PYTHON} must name a Python with mooncake-transfer-engine-non-cuda")
    port, metrics = _free_port(), _free_port()
    master = os.path.join(os.path.dirname(python), "mooncake_master")
    arguments = (f"--rpc_port={port}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1")
    async with _process(master, arguments, port, "libibverbs1 (Debian)"):
        client = os.path.join(os.path.dirname(__file__), "mooncake_client.py")
        process = await asyncio.create_subprocess_exec(
            *(python, client, str(_free_port()), str(port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            yield _Mooncake(process)
        finally:
            await _end(process)


@asynccontextmanager
async def _process(program: str, arguments: Sequence[str], port: int, package: str) -> AsyncIterator[None]:
    """A server until the block ends; it listens on `port` when the block begins. Raises NotInstalled."""
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if path is None:
        raise NotInstalled(f"{os.path.basename(program)} is missing: install {package}")
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(path, *arguments, stdout=null, stderr=null)
    try:
        await _listening(process, port, package)
        yield
    finally:
        await _end(process)


async def _listening(process: asyncio.subprocess.Process, port: int, package: str) -> None:
    async with asyncio.timeout(START_S):
        while True:
            if process.returncode is not None:
                raise NotInstalled(f"it does not start; is {package} there?")
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), CALL_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _unary(channel: grpc.aio.Channel, method: str) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    return call


def _check(found: int, least_bytes: int) -> None:
    if found < least_bytes:
        raise AnswerTooShort(f"{found} bytes came back, {least_bytes} were kept")


def _free_port() -> int:
    """For servers that cannot say which port they were given."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        return port
