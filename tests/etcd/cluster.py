"""Real etcd members in folders of a test: started, killed, stopped, resumed, restarted with their data, restored.

Knows nothing of the client under test; a member's health and role are asked over its plain HTTP metrics address, which
has no TLS and no users. Invariant: nothing started here outlives `close`, nor a killed test run where `setpriv` is
installed. Members are plain processes, so one cluster may serve tests with different event loops; start them in a
thread that lives as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.integration.certificates import Authority, Files
from tests.ports import free_ports

ETCD: Final = "KVLEASE_TEST_ETCD"
"""Names an etcd binary; without it, the one on PATH."""
ETCDCTL: Final = "KVLEASE_TEST_ETCDCTL"
READY_S: Final = 20.0
ASK_S: Final = 0.5
POLL_S: Final = 0.03
STOP_S: Final = 5.0
CONTROL_S: Final = 20.0
LOG_LINES: Final = 25
ROOT: Final = "root"


class EtcdFailed(RuntimeError):
    """A member or etcdctl did not do what the test needs; the message ends with what it said."""


class EtcdMissing(RuntimeError):
    """There is no etcd here; the message says what to install."""


def binary(variable: str, name: str, package: str) -> str:
    """Path of a program of etcd's. Raises EtcdMissing."""
    path = os.environ.get(variable) or shutil.which(name)
    if not path:
        raise EtcdMissing(f"{name} is not installed: apt-get install {package}, or name one in {variable}")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """What to start. `hosts`: one for each member; `prefix`: words before the command of the member of that name.

    `tls`: clients need a certificate of `Cluster.authority`. `password`: of the user root, and users are on.
    """

    folder: Path
    hosts: Sequence[str] = ("127.0.0.1",) * 3
    flags: Sequence[str] = ()
    tls: bool = False
    password: str = ""
    prefix: Callable[[str], Sequence[str]] = lambda _: ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A member's name, addresses and folder; they stay when it is restarted or restored."""

    name: str
    folder: Path
    host: str
    client_port: int
    peer_port: int
    metrics_port: int

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.client_port}"

    @property
    def peer_url(self) -> str:
        return f"http://{self.host}:{self.peer_port}"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "log"


class Member:
    """One member. Its process may come and go."""

    def __init__(self, place: Place, command: Sequence[str]) -> None:
        self.place: Final = place
        self._command: Final = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self.stopped = False

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def endpoint(self) -> str:
        return self.place.endpoint

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Raises EtcdFailed if it does not run."""
        if self._process is None or self._process.poll() is not None:
            raise EtcdFailed(f"{self.name} does not run:\n{self.log_end()}")
        return self._process.pid

    def start(self) -> None:
        """Start it with the data it has; `ready` waits for it."""
        if self.running:
            return
        self.place.folder.mkdir(parents=True, exist_ok=True)
        with self.place.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_dying_with_us(), *self._command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.stopped = False

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(STOP_S)
        self.stopped = False

    def stop(self) -> None:
        """SIGSTOP: it hangs with its connections open. All its threads have stopped when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped = True
        end_s = time.monotonic() + STOP_S
        while not _all_stopped(self.pid):
            if time.monotonic() > end_s:
                raise EtcdFailed(f"{self.name} runs on {STOP_S} s after SIGSTOP")
            time.sleep(0.001)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self.stopped = False

    async def ready(self, timeout_s: float = READY_S) -> None:
        """Wait until it serves and knows a leader. Raises EtcdFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.healthy():
                    _ = self.pid
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise EtcdFailed(f"{self.name} is not ready after {timeout_s} s:\n{self.log_end()}") from error

    async def healthy(self) -> bool:
        """Whether it answers, and can read through the cluster."""
        text = await self._ask("/health")
        try:
            return bool(text) and json.loads(text).get("health") == "true"
        except ValueError:
            return False

    async def leads(self) -> bool:
        """Whether it believes to be the leader; a stopped one does not answer, so no."""
        return "\netcd_server_is_leader 1" in await self._ask("/metrics")

    def log_end(self) -> str:
        text = self.place.log.read_text(errors="replace") if self.place.log.exists() else ""
        return "\n".join(text.splitlines()[-LOG_LINES:])

    async def _ask(self, path: str) -> str:
        """Body of a GET, "" if there is none in time."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(ASK_S):
                reader, writer = await asyncio.open_connection(self.place.host, self.place.metrics_port)
                writer.write(f"GET {path} HTTP/1.0\r\nHost: etcd\r\n\r\n".encode())
                return (await reader.read()).partition(b"\r\n\r\n")[2].decode(errors="replace")
        except (OSError, TimeoutError):
            return ""
        finally:
            if writer is not None:
                writer.close()


class Cluster:
    """All members of one cluster. `etcd_cluster` makes it."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Choose addresses and write certificates; `start` starts it. Raises EtcdMissing."""
        self.settings: Final = settings
        self.authority: Final = Authority(settings.folder / "tls") if settings.tls else None
        self._server: Final = self.authority.server("etcd") if self.authority else None
        self._operator: Final = self.authority.client("operator") if self.authority else None
        places = [_place(settings, number, host) for number, host in enumerate(settings.hosts, 1)]
        initial = ",".join(f"{place.name}={place.peer_url}" for place in places)
        self._initial: Final = initial
        self.members: Final[Mapping[str, Member]] = {
            place.name: Member(place, _command(settings, place, initial, self._server)) for place in places
        }

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members.values())

    async def start(self) -> None:
        """Start all members and wait for them; turn users on if there is a password. Raises EtcdFailed."""
        await self.heal()
        if self.settings.password:
            await self.control("user", "add", f"{ROOT}:{self.settings.password}", user=False)
            await self.control("user", "grant-role", ROOT, ROOT, user=False)
            await self.control("auth", "enable", user=False)

    async def heal(self) -> None:
        """All members run, none is stopped, all are ready."""
        for member in self.members.values():
            if member.stopped:
                member.resume()
            member.start()
        await asyncio.gather(*(member.ready() for member in self.members.values()))

    async def leader(self, timeout_s: float = READY_S) -> Member:
        """The member that leads, as soon as there is one among those that run. Raises EtcdFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    for member in self.members.values():
                        if member.running and not member.stopped and await member.leads():
                            return member
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise EtcdFailed(f"no leader within {timeout_s} s") from error

    async def follower(self) -> Member:
        """A running member that does not lead."""
        leader = await self.leader()
        return next(one for one in self.members.values() if one is not leader and one.running and not one.stopped)

    def named(self, endpoint: str) -> Member:
        """The member at this client address."""
        return next(one for one in self.members.values() if one.endpoint == endpoint)

    async def control(self, *words: str, at: Member | None = None, user: bool = True, told: str = "") -> str:
        """What `etcdctl WORDS` says; `told` is its standard input. Raises EtcdFailed, EtcdMissing."""
        endpoints = at.endpoint if at else ",".join(self.endpoints)
        options = ["--endpoints", endpoints, "--command-timeout", "10s"]
        if self._operator is not None:
            options += ["--cacert", str(self._operator.ca), "--cert", str(self._operator.cert)]
            options += ["--key", str(self._operator.key)]
        if user and self.settings.password:
            options += ["--user", f"{ROOT}:{self.settings.password}"]
        return await _control(*options, *words, told=told)

    async def save(self, snapshot: Path) -> None:
        """A snapshot of the store, from any one member."""
        member = next(one for one in self.members.values() if one.running)
        await self.control("snapshot", "save", str(snapshot), at=member)

    async def restore(self, snapshot: Path, token: str = "kvlease-test") -> None:
        """Kill all, put the snapshot in place of all data, start again; another `token` makes another cluster id."""
        for member in self.members.values():
            member.kill()
            shutil.rmtree(member.place.data, ignore_errors=True)
        for member in self.members.values():
            place = member.place
            words = ["snapshot", "restore", str(snapshot), "--name", place.name, "--data-dir", str(place.data)]
            words += ["--initial-cluster", self._initial, "--initial-cluster-token", token]
            await _control(*words, "--initial-advertise-peer-urls", place.peer_url)
        await self.heal()

    def close(self) -> None:
        """End all members. Idempotent."""
        for member in self.members.values():
            member.kill()


@asynccontextmanager
async def etcd_cluster(settings: ClusterSettings) -> AsyncIterator[Cluster]:
    """A running cluster, ended with the block. Raises EtcdMissing, EtcdFailed."""
    cluster = Cluster(settings)
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.close()


def _place(settings: ClusterSettings, number: int, host: str) -> Place:
    client, peer, metrics = free_ports(3, host if not settings.prefix(f"m{number}") else "127.0.0.1")
    return Place(
        name=f"m{number}",
        folder=settings.folder / f"m{number}",
        host=host,
        client_port=client,
        peer_port=peer,
        metrics_port=metrics,
    )


def _command(settings: ClusterSettings, place: Place, initial: str, server: Files | None) -> list[str]:
    scheme = "https" if server else "http"
    client_url = f"{scheme}://{place.endpoint}"
    command = [*settings.prefix(place.name), binary(ETCD, "etcd", "etcd-server"), "--name", place.name]
    command += ["--data-dir", str(place.data), "--logger", "zap", "--log-outputs", "stderr"]
    command += ["--listen-client-urls", client_url, "--advertise-client-urls", client_url]
    command += ["--listen-peer-urls", place.peer_url, "--initial-advertise-peer-urls", place.peer_url]
    command += ["--listen-metrics-urls", f"http://{place.host}:{place.metrics_port}"]
    command += ["--initial-cluster", initial, "--initial-cluster-token", "kvlease-test"]
    command += ["--initial-cluster-state", "new"]
    if server is not None:
        command += ["--cert-file", str(server.cert), "--key-file", str(server.key)]
        command += ["--trusted-ca-file", str(server.ca), "--client-cert-auth"]
    if settings.password:
        command += ["--bcrypt-cost", "4"]
    return [*command, *settings.flags]


def _all_stopped(pid: int) -> bool:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it ended
            if (thread / "stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
                return False
    return True


def _dying_with_us() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


async def _control(*words: str, told: str = "") -> str:
    """Run etcdctl in a process of its own; bounded."""
    process = await asyncio.create_subprocess_exec(
        binary(ETCDCTL, "etcdctl", "etcd-client"),
        *words,
        env={**os.environ, "ETCDCTL_API": "3"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(CONTROL_S):
            said, _ = await process.communicate(told.encode())
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise EtcdFailed(f"etcdctl {words[-1]} took more than {CONTROL_S} s") from error
    if process.returncode != 0:
        raise EtcdFailed(f"etcdctl failed: {said.decode(errors='replace')}")
    return said.decode(errors="replace")
