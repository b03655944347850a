"""Where the parties of a chaos run live: a network namespace each, so that any two can be cut apart, one way or both.

A cut is a wrong link-layer address at the sender: what it sends to the other is gone without a word, and the other way
goes on. Needs `ip` and `unshare`, no firewall. Where namespaces are not permitted, all live on loopback and no cut can
be made; `Network.divisible` says so, and so does the run.
Invariant: everything here is inside the run's own namespaces, and gone with its last process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NoReturn

OURS: Final = "KVLEASE_CHAOS_NAMESPACE"
"""Set in a process that is in namespaces of its own: "yes", or "no" if it could not get any."""
BRIDGE: Final = "chaos0"
INTERFACE: Final = "eth0"
HERE: Final = "10.203.0.1"
"""The run itself, which is never cut off from anybody."""
NOWHERE: Final = "02:00:00:00:00:99"
LOOPBACK: Final = "127.0.0.1"
COMMAND_S: Final = 20.0
_CLONE_NEWNET: Final = 0x40000000


class NetworkFailed(RuntimeError):
    """`ip` did not do what the run needs."""


def enter_own_namespaces(arguments: Sequence[str]) -> None:
    """Start this process over in namespaces of its own, or go on without if they are not permitted.

    `arguments`: after the interpreter, to start this program again.
    """
    if os.environ.get(OURS):
        return
    unshare = _unshare()
    if unshare is None:
        os.environ[OURS] = "no"
        return
    os.environ[OURS] = "yes"
    _start_over([*unshare, sys.executable, *arguments])


def _start_over(command: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    os.execvp(command[0], list(command))


def _unshare() -> list[str] | None:
    """The command that starts another one in its own namespaces; None if that is not permitted here."""
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("ip") is None:
        return None
    command = [unshare, "--net", "--mount"] if os.geteuid() == 0 else [unshare, "--net", "--mount", "--map-root-user"]
    trial = (
        "mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns && ip netns add trial && ip link add trial type bridge"
    )
    tried = subprocess.run([*command, "sh", "-c", trial], capture_output=True, timeout=COMMAND_S, check=False)
    return command if tried.returncode == 0 else None


class Network:
    """Parties by name. Make one in a process that `enter_own_namespaces` has started over."""

    def __init__(self, parties: Iterable[str]) -> None:
        """Raises NetworkFailed."""
        self.parties: Final = tuple(parties)
        self.divisible: Final = os.environ.get(OURS) == "yes"
        """Whether parties can be cut apart."""
        self._numbers: Final = {name: 10 + number for number, name in enumerate(self.parties)}
        self._cut: set[tuple[str, str]] = set()
        if self.divisible:
            self._build()

    @property
    def cuts(self) -> frozenset[tuple[str, str]]:
        """Pairs (from, to) between which nothing passes."""
        return frozenset(self._cut)

    def host(self, name: str) -> str:
        """The party's address."""
        return f"10.203.0.{self._numbers[name]}" if self.divisible else LOOPBACK

    def prefix(self, name: str) -> list[str]:
        """Words before a command that is to run as this party."""
        return ["ip", "netns", "exec", name] if self.divisible else []

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        """From now on nothing gets from the first to the second of each pair. Raises NetworkFailed."""
        fresh = set(pairs) - self._cut
        self._change(fresh, f"replace {{}} lladdr {NOWHERE} dev {INTERFACE} nud permanent")
        self._cut |= fresh

    def mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        """The opposite. Raises NetworkFailed."""
        whole = set(pairs) & self._cut
        self._change(whole, f"del {{}} dev {INTERFACE}")
        self._cut -= whole

    def socket(self, name: str) -> socket.socket:
        """A TCP socket that belongs to the party, not blocking; it can listen at or connect from where the party is."""
        if not self.divisible:
            made = socket.socket()
        else:
            with open("/proc/self/ns/net", "rb") as here, open(f"/run/netns/{name}", "rb") as there:
                _enter(there.fileno())
                try:
                    made = socket.socket()
                finally:
                    _enter(here.fileno())
        made.setblocking(False)
        return made

    def _build(self) -> None:
        Path("/run/netns").mkdir(parents=True, exist_ok=True)
        lines = ["link set lo up", f"link add {BRIDGE} type bridge", f"addr add {HERE}/16 dev {BRIDGE}"]
        lines += [f"link set {BRIDGE} up"]
        _run(["mount", "-t", "tmpfs", "tmpfs", "/run/netns"])
        for name, number in self._numbers.items():
            _run(["ip", "netns", "add", name])
            lines += [f"link add p{number} type veth peer name {INTERFACE} netns {name}"]
            lines += [f"link set p{number} master {BRIDGE} up"]
        _run(["ip", "-batch", "-"], "\n".join(lines))
        for name in self.parties:
            own = ["link set lo up", f"addr add {self.host(name)}/16 dev {INTERFACE}", f"link set {INTERFACE} up"]
            _run(["ip", "-n", name, "-batch", "-"], "\n".join(own))

    def _change(self, pairs: set[tuple[str, str]], order: str) -> None:
        if pairs and not self.divisible:
            raise NetworkFailed("parties cannot be cut apart here: network namespaces are not permitted")
        for sender in {source for source, _ in pairs}:
            lines = ["neigh " + order.format(self.host(target)) for source, target in pairs if source == sender]
            _run(["ip", "-n", sender, "-batch", "-"], "\n".join(sorted(lines)))


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise NetworkFailed(f"setns: {os.strerror(ctypes.get_errno())}")


def _run(command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(command, input=text + "\n", capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise NetworkFailed(f"{' '.join(command)}: {done.stderr.strip()}")
