"""What deploy/compose/compose.yaml describes, as plain processes on this machine: each service on a loopback address.

Commands, environment and health checks are the file's own, with three things put in place of others: addresses for
the names of services, folders of the test for mounts, and this checkout's `kvlease` for the image's. Users, limits and
whatever else only a container has is left out. Invariant: nothing started here outlives `close`.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import yaml
from kvlease.registry.client_credentials import Credentials

from tests.deploy.tools import DEPLOY, said
from tests.etcd.cluster import ETCD, ETCDCTL, binary

FILE: Final = DEPLOY / "compose" / "compose.yaml"
MEMBERS: Final = ("etcd-0", "etcd-1", "etcd-2")
REGISTRIES: Final = ("registry-0", "registry-1")
GRPC: Final = 7411
METRICS: Final = 2381
HEALTHY_S: Final = 30.0
STOP_S: Final = 15.0
POLL_S: Final = 0.2
ANYWHERE: Final = ("0.0.0.0", "127.0.0.1", "localhost")


class Compose:
    """The services, started one by one. `compose` makes it."""

    def __init__(self, folder: Path) -> None:
        """Chooses addresses; starts nothing."""
        self.services: Final[dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
        self._folder: Final = folder
        block = f"127.{random.randint(16, 250)}.{random.randint(0, 255)}"
        self._addresses: Final = {name: f"{block}.{number}" for number, name in enumerate(self.services, 10)}
        self._running: Final[dict[str, asyncio.subprocess.Process]] = {}

    def make_certificates(self) -> None:
        """What the service of that name does, with the addresses of this run beside the names of its environment."""
        given: dict[str, str] = self.services["certificates"]["environment"]
        loopback = ["IP:127.0.0.1", *(f"IP:{address}" for address in self._addresses.values())]
        names = {key: ",".join([_default(given[key]), *loopback]) for key in ("ETCD_NAMES", "REGISTRY_NAMES")}
        said(["bash", DEPLOY / "certificates.sh", self._folder / "certificates"], env=names)

    def endpoint(self, name: str, port: int = GRPC) -> str:
        return f"{self._addresses[name]}:{port}"

    @property
    def registries(self) -> str:
        """What the name of all registries stands for: an address of each."""
        return ",".join(self.endpoint(name) for name in REGISTRIES)

    def proof(self, place: str) -> Credentials:
        """What one folder of certificates proves, such as clients/decode-0."""
        folder = self._folder / "certificates" / place
        return Credentials(**{f"tls_{x}": str(folder / f) for x, f in _FILES.items()})

    async def start(self, name: str) -> None:
        """With the data it has; `healthy` waits for it."""
        service = self.services[name]
        environment = {key: self._placed(name, str(x)) for key, x in service.get("environment", {}).items()}
        for _, source, target in self._mounts(name):
            if not target.startswith("/certificates"):
                source.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = await asyncio.create_subprocess_exec(
                *_dying_with_us(),
                *self._command(name, service["command"]),
                env={**_plain_environment(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def healthy(self, *names: str) -> None:
        """Wait until the health checks of these services succeed. Raises AssertionError with the end of a log."""
        for name in names:
            try:
                async with asyncio.timeout(HEALTHY_S):
                    while await self.check(name):
                        assert self._running[name].returncode is None, f"{name} ended:\n{self.log_end(name)}"
                        await asyncio.sleep(POLL_S)
            except TimeoutError as error:
                raise AssertionError(f"{name} is not healthy:\n{self.log_end(name)}") from error

    async def check(self, name: str) -> int:
        """Exit status of the service's health check, once."""
        words = self._command(name, self.services[name]["healthcheck"]["test"][1:])
        process = await asyncio.create_subprocess_exec(
            *words,
            env={**_plain_environment(), "ETCDCTL_API": "3"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return await process.wait()

    async def stop(self, name: str) -> int:
        """SIGTERM, as compose sends it. Returns the exit status. Raises TimeoutError past the grace period."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        await process.wait()

    def forget(self, name: str) -> None:
        """Delete the volumes of a service that does not run."""
        assert name not in self._running
        for _, source, target in self._mounts(name):
            if not target.startswith("/certificates"):
                shutil.rmtree(source)

    async def close(self) -> None:
        for name in list(self._running):
            await self.kill(name)

    def log_end(self, name: str) -> str:
        return "\n".join((self._folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:])

    def ask_etcd(self, member: str, proof: Credentials) -> list[str]:
        """The command that asks a member for its health, by whoever has this proof."""
        return [
            binary(ETCDCTL, "etcdctl", "etcd-client"),
            f"--endpoints=https://{self.endpoint(member, 2379)}",
            f"--cacert={self._folder / 'certificates' / 'etcd' / 'server' / 'ca.crt'}",
            f"--cert={proof.tls_cert}",
            f"--key={proof.tls_key}",
            "--command-timeout=3s",
            "endpoint",
            "health",
        ]

    def _command(self, name: str, words: Sequence[str]) -> list[str]:
        first, *rest = words if words[0] in ("etcd", "etcdctl", "kvlease") else ("kvlease", *words)
        programs = {
            "etcd": lambda: [binary(ETCD, "etcd", "etcd-server")],
            "etcdctl": lambda: [binary(ETCDCTL, "etcdctl", "etcd-client")],
            "kvlease": lambda: [sys.executable, "-m", "kvlease.cli"],
        }
        return [*programs[first](), *(self._placed(name, word) for word in rest)]

    def _placed(self, name: str, text: str) -> str:
        """`text` of a service, with the addresses and folders of this run."""
        for _, source, target in self._mounts(name):
            text = re.sub(rf"(?<![\w/]){re.escape(target)}(?=/|$)", str(source), text)
        own = self._addresses[name]
        known = {**self._addresses, **dict.fromkeys(ANYWHERE, own)}
        text = re.sub(rf"\bregistry:{GRPC}", self.registries, _default(text))
        return re.sub(r"(?<![\w.-])([a-z0-9][a-z0-9.-]*)(?=:\d)", lambda match: known.get(match[1], match[1]), text)

    def _mounts(self, name: str) -> list[tuple[str, Path, str]]:
        """Mode, folder here and folder in the container, of each volume."""
        found = []
        for volume in self.services[name].get("volumes", []):
            source, target, *mode = volume.split(":")
            found.append(("".join(mode), self._folder / source, target))
        return found


@asynccontextmanager
async def compose(folder: Path) -> AsyncIterator[Compose]:
    """With certificates made, and nothing started; all that was is ended with the block."""
    services = Compose(folder)
    try:
        services.make_certificates()
        yield services
    finally:
        await services.close()


_FILES: Final[Mapping[str, str]] = {"ca": "ca.crt", "cert": "tls.crt", "key": "tls.key"}


def _default(text: str) -> str:
    """`${NAME:-value}` as it is where NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def _plain_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("KVLEASE_", "ETCD"))}


def _dying_with_us() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
