"""`kvlease registry`: reads the settings, runs a registry until SIGTERM or SIGINT, and says plainly what is wrong.

Nothing of the registry's behaviour is here; `kvlease.registry.server` has the order of starting and stopping.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import uvloop
from kvlease.cli import exits
from kvlease.cli.logs import configure_logging
from kvlease.registry.flags import SettingsError
from kvlease.registry.heap import freeze_survivors
from kvlease.registry.server import RegistryServer, StartError
from kvlease.registry.settings import RegistrySettings, load

_log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Runs a registry. Returns the exit status."""
    try:
        settings = load(argv)
    except SettingsError as error:
        sys.stderr.write("".join(f"kvlease registry: {line}\n" for line in str(error).splitlines()))
        return exits.USAGE
    configure_logging(settings.log_level, settings.log_format)
    freeze_survivors()
    try:
        uvloop.run(_run(settings))
    except StartError as error:
        sys.stderr.write(f"kvlease registry: {error}\n")
        return exits.FAILED
    return exits.DONE


async def _run(settings: RegistrySettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with RegistryServer(settings):
        await stop.wait()
        _log.info("stopping: lenders are told to connect elsewhere")
