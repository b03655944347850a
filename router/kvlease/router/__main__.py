"""`kvlease router`: reads the settings, runs a router until SIGTERM or SIGINT, and says plainly what is wrong.

Exit status: 0 after an orderly end, 1 if the address cannot be served, 2 for a wrong setting.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import Final

import uvloop
from kvlease.registry.flags import SettingsError
from kvlease.registry.telemetry import configure_tracing
from kvlease.router.server import RouterServer, StartError
from kvlease.router.settings import RouterSettings, load

EXIT_FAILED: Final = 1
EXIT_SETTINGS: Final = 2
_LOG: Final = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Runs a router; `argv` None means this process's arguments. Returns the exit status."""
    try:
        settings = load(sys.argv[1:] if argv is None else argv)
    except SettingsError as error:
        sys.stderr.write("".join(f"kvlease router: {line}\n" for line in str(error).splitlines()))
        return EXIT_SETTINGS
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    # aiohttp logs what it could not parse, and that can be a credential.
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    try:
        uvloop.run(_run(settings))
    except StartError as error:
        sys.stderr.write(f"kvlease router: {error}\n")
        return EXIT_FAILED
    return 0


async def _run(settings: RouterSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tracing = configure_tracing("kvlease-router", otlp_endpoint=settings.otlp_endpoint)
    try:
        async with RouterServer(settings, tracer=tracing.tracer):
            await stop.wait()
            _LOG.info("router stops: turns in flight have %d ms", settings.drain_timeout_ms)
    finally:
        await asyncio.to_thread(tracing.close)


if __name__ == "__main__":
    sys.exit(main())
