"""Loopback ports for servers that tests start: below those that the kernel gives to outgoing connections.

A port of the kernel's own choice may be some client's by the time the server binds it; stock's side channel then waits
for ever. Restarts find the same port free.
"""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

RANGE: Final = (20_000, 32_000)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody uses now, all different."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind((host, random.randrange(*RANGE)))
                ports.append(int(one.getsockname()[1]))
        return ports


def free_port(host: str = "127.0.0.1") -> int:
    """One of them."""
    return free_ports(1, host)[0]
