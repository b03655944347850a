"""`python -m tests.engines.fleet up|serve|down`: a fleet to work with by hand.

`serve` runs one in the foreground until Ctrl-C; `up` leaves such a `serve` in the background, waits until all is ready
and prints where everything listens as JSON; `down` ends it. Fleets have names, so several can run. Nothing here knows
how a process is started: `fleet.py` does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.engines.children import TERM_GRACE_S, python_module, tail
from tests.engines.engine import EngineSettings, Json, Role
from tests.engines.fleet import READY_TIMEOUT_S, Fleet, FleetSettings
from tests.engines.model import CACHE, MODEL_NAME, REPOSITORY

FLEETS: Final = CACHE / "fleet"
STOP_TIMEOUT_S: Final = 4 * TERM_GRACE_S


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.fleet", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("up", "start in the background and print the addresses"),
        ("serve", "run in the foreground"),
        ("down", "stop what `up` started"),
    ):
        command = commands.add_parser(name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.add_argument("--name", default="default", help="of the fleet")
        if name != "down":
            _add_fleet_flags(command)
    return parser


def _add_fleet_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--kvlease", action="store_true", help="run kvlease's connector; without it, vLLM's own")
    command.add_argument("--kvlease-config", default="{}", help="JSON object: settings of the connector, both roles")
    command.add_argument("--prefill", type=int, default=1, help="number of prefill engines")
    command.add_argument("--decode", type=int, default=1, help="number of decode engines")
    for role in Role:
        command.add_argument(f"--{role}-args", default="", help=f"further vLLM flags of each {role} engine")
        command.add_argument(f"--{role}-blocks", type=int, help=f"KV blocks of each {role} engine")
        command.add_argument(f"--{role}-extra", default="{}", help=f"JSON: kv_connector_extra_config of {role} engines")
    command.add_argument("--no-prefill-caching", action="store_true", help="prefix cache of prefill engines off")
    command.add_argument("--max-model-len", type=int, default=16_384, help="tokens")
    command.add_argument("--shutdown-timeout", type=int, default=0, help="seconds that engines may take to end")
    command.add_argument("--transports", default="sm,tcp,self", help="UCX_TLS")
    command.add_argument("--no-registry", action="store_true", help="do not start a registry")
    command.add_argument("--no-router", action="store_true", help="do not start a router")
    command.add_argument("--otlp", help="http://host:port of an OTLP gRPC receiver")


def _engines(options: argparse.Namespace) -> tuple[EngineSettings, ...]:
    kvlease: dict[str, Json] | None = json.loads(options.kvlease_config) if options.kvlease else None
    flags = vars(options)
    return tuple(
        EngineSettings(
            engine_id=f"{options.name}-{role}-{number}",
            role=role,
            kvlease=kvlease,
            connector_extra=json.loads(flags[f"{role}_extra"]),
            kv_blocks=flags[f"{role}_blocks"],
            max_model_len=options.max_model_len,
            prefix_caching=not (role is Role.PREFILL and options.no_prefill_caching),
            shutdown_timeout_s=options.shutdown_timeout,
            transports=options.transports,
            arguments=tuple(shlex.split(flags[f"{role}_args"])),
        )
        for role in Role
        for number in range(flags[role])
    )


def _state_file(name: str) -> Path:
    return FLEETS / name / "state.json"


def _description(fleet: Fleet) -> dict[str, Json]:
    settings = fleet.settings
    return {
        "pid": os.getpid(),
        "model": MODEL_NAME,
        "router": fleet.router_url if settings.router else None,
        "registry": fleet.registry_endpoint,
        **{str(role): {name: fleet.engine_url(name) for name in fleet.ids(role)} for role in Role},
        "logs": str(settings.log_dir),
    }


async def _serve(options: argparse.Namespace) -> None:
    state = _state_file(options.name)
    settings = FleetSettings(
        engines=_engines(options),
        registry=not options.no_registry,
        router=not options.no_router,
        otlp_endpoint=options.otlp,
        log_dir=state.parent,
    )
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        async with Fleet(settings, lambda name, what: print(f"{name}: {what}", flush=True)) as fleet:
            ready = state.with_suffix(".new")
            ready.write_text(json.dumps(_description(fleet), indent=2))
            ready.rename(state)
            await asyncio.Event().wait()
    finally:
        state.unlink(missing_ok=True)


def _up(argv: Sequence[str], name: str) -> int:
    state, log = _state_file(name), FLEETS / name / "serve.log"
    if state.exists():
        print(f"a fleet named {name} is up, or ended badly: run `down --name {name}` first", file=sys.stderr)
        return 2
    log.parent.mkdir(parents=True, exist_ok=True)
    for old in log.parent.glob("*.log"):
        old.unlink()
    with log.open("wb") as out:
        serving = subprocess.Popen(
            python_module("tests.engines.fleet", "serve", *argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            start_new_session=True,
        )
    deadline = time.monotonic() + READY_TIMEOUT_S + STOP_TIMEOUT_S
    while not state.exists():
        if serving.poll() is not None or time.monotonic() > deadline:
            serving.terminate()
            print(f"the fleet did not start; {log}:\n{tail(log, 60)}", file=sys.stderr)
            return 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            serving.wait(0.2)
    print(state.read_text())
    return 0


def _down(name: str) -> int:
    state = _state_file(name)
    if not state.exists():
        print(f"no fleet named {name}", file=sys.stderr)
        return 0
    pid = int(json.loads(state.read_text())["pid"])
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        state.unlink(missing_ok=True)
        return 0
    with os.fdopen(handle) as process:
        import select

        signal.pidfd_send_signal(process.fileno(), signal.SIGTERM)
        ended, _, _ = select.select([process], [], [], STOP_TIMEOUT_S)
    if not ended:
        print(f"process {pid} did not end within {STOP_TIMEOUT_S:.0f} s", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    if options.command == "up":
        return _up(arguments[1:], options.name)
    if options.command == "down":
        return _down(options.name)
    try:
        asyncio.run(_serve(options))
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:
        pass
    return 0
