"""What happens to the fleet during a soak, by seed: each process is killed or terminated and started again, engines are
stopped, reset, paused and drained.

Each disturbance is over when it returns. Invariant: an outage is told to the judge before the signal is sent.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

import aiohttp
from kvlease.registry.client import RegistryClient
from kvlease.registry.errors import KvleaseError
from kvlease.registry.values import EngineId

from tests.engines.engine import Role
from tests.engines.fleet import REGISTRY, ROUTER
from tests.soak.judge import Fault, Outage
from tests.soak.scene import Scene

LONGEST_STOP_S: Final = 6.0
LONGEST_ABSENCE_S: Final = 8.0
END_TIMEOUT_S: Final = 20.0
"""From the signal that ends a process to its end. An engine that drains is to be gone within 10 s on a free machine."""

ROLES: Final = ("prefill", "decode", "registry", "router")
RESTARTS: Final = ("kill", "terminate")
"""How a disturbance's name begins that restarts a process."""

Disturbance = Callable[[], Awaitable[str]]
"""Does it, and returns what was done."""


class Disturbances:
    """`again()` does the next one."""

    def __init__(self, scene: Scene, rng: random.Random, *, restarts_only: bool = False) -> None:
        self._scene = scene
        self._rng = rng
        self.absent: set[str] = set()
        """Processes that are killed and not yet restarted."""
        self._kinds: Mapping[str, tuple[Disturbance, int]] = {
            "kill decode": (lambda: self._restart(self._decode, signal.SIGKILL), 3),
            "kill prefill": (lambda: self._restart(self._prefill, signal.SIGKILL), 3),
            "kill registry": (lambda: self._restart(REGISTRY, signal.SIGKILL), 3),
            "kill router": (lambda: self._restart(ROUTER, signal.SIGKILL), 3),
            "terminate decode": (lambda: self._restart(self._decode, signal.SIGTERM), 1),
            "terminate prefill": (lambda: self._restart(self._prefill, signal.SIGTERM), 1),
            "terminate registry": (lambda: self._restart(REGISTRY, signal.SIGTERM), 1),
            "terminate router": (lambda: self._restart(ROUTER, signal.SIGTERM), 1),
            "stop decode": (lambda: self._stop(self._decode), 2),
            "stop prefill": (lambda: self._stop(self._prefill), 1),
            "reset decode": (self._reset, 2),
            "pause decode": (self._pause, 1),
            "drain decode": (self._drain, 1),
        }
        if restarts_only:
            self._kinds = {name: kind for name, kind in self._kinds.items() if name.startswith(RESTARTS)}
        self._deck: list[str] = []

    async def again(self) -> str:
        """The next of a shuffled deck; says what it was. Raises ChildFailed."""
        if not self._deck:
            self._deck = [name for name, (_, weight) in self._kinds.items() for _ in range(weight)]
            self._rng.shuffle(self._deck)
        name = self._deck.pop()
        self._scene.judge.counts[name] += 1
        return await self._kinds[name][0]()

    def restarts(self) -> Mapping[str, int]:
        """How often a process of each role has been restarted so far."""
        counts = self._scene.judge.counts
        return {role: sum(counts[f"{how} {role}"] for how in RESTARTS) for role in ROLES}

    @property
    def _decode(self) -> str:
        return self._rng.choice(self._scene.fleet.ids(Role.DECODE))

    @property
    def _prefill(self) -> str:
        return self._rng.choice(self._scene.fleet.ids(Role.PREFILL))

    async def _restart(self, name: str, number: signal.Signals) -> str:
        scene = self._scene
        await scene.counters.update()
        excuses = name == ROUTER or name in scene.fleet.ids(Role.DECODE)
        outage = Outage(name=name, excuses=excuses, began_s=time.monotonic())
        scene.judge.outages.append(outage)
        self.absent.add(name)
        child = scene.fleet.child(name)
        child.signal(number)
        try:
            await child.wait(END_TIMEOUT_S)
        except TimeoutError:
            scene.judge.fault(Fault.HANG, f"{name} is still there {END_TIMEOUT_S:.0f} s after {number.name}")
            await child.stop(grace_s=0)
        await asyncio.sleep(self._rng.random() ** 2 * LONGEST_ABSENCE_S)
        await scene.fleet.start(name)
        outage.ended_s = time.monotonic()
        self.absent.remove(name)
        return f"{name} ended by {number.name}, back after {outage.ended_s - outage.began_s:.1f} s"

    async def _stop(self, name: str) -> str:
        seconds = self._rng.uniform(0.5, LONGEST_STOP_S)
        child = self._scene.fleet.child(name)
        child.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            child.signal(signal.SIGCONT)
        return f"{name} stopped for {seconds:.1f} s"

    async def _reset(self) -> str:
        name = self._decode
        await self._post(name, "/reset_prefix_cache")
        return f"{name}: prefix cache reset"

    async def _pause(self) -> str:
        name, seconds = self._decode, self._rng.uniform(0.5, LONGEST_STOP_S)
        # vLLM cannot clear its cache while it keeps requests that wait for remote KV.
        mode = self._rng.choice(["keep&clear_cache=false", "wait"])
        await self._post(name, f"/pause?mode={mode}")
        await asyncio.sleep(seconds)
        await self._post(name, "/resume")
        return f"{name} paused ({mode}) for {seconds:.1f} s"

    async def _drain(self) -> str:
        endpoint, name = self._scene.fleet.registry_endpoint, self._decode
        assert endpoint is not None
        ended = 0
        with suppress(KvleaseError):
            async with RegistryClient(endpoint) as client:
                ended = await client.end_engine(EngineId(name), timeout_ms=5_000)
        return f"{name}: {ended} leases ended by an operator"

    async def _post(self, name: str, path: str) -> None:
        url = self._scene.fleet.engine_url(name) + path
        try:
            async with self._scene.http.post(url) as response:
                if response.status != 200:
                    text = await response.text()
                    self._scene.judge.fault(Fault.ERROR, f"{path} on {name}: {response.status} {text[:200]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self._scene.judge.fault(Fault.ERROR, f"{path} on {name}: {type(error).__name__}")
