"""Measures how late the event loop comes round, and tells `overload.py`. Nothing is decided here.

A timer that fires late has waited for everything that was ready before it: calls, streams, ticks.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, NoReturn

from kvlease.registry.overload import Overload

PROBE_S: Final = 0.05
"""Between two looks: short against any limit worth setting, and 20 wake-ups a second cost nothing."""

_log = logging.getLogger(__name__)


async def feel_load(overload: Overload) -> NoReturn:
    """Observe until cancelled; changes of load are logged."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + PROBE_S
        await asyncio.sleep(PROBE_S)
        lag_ms = max(0.0, loop.time() - due_s) * 1_000
        before = overload.load
        overload.observe(lag_ms)
        if overload.load is not before:
            _log.warning(
                "load is %s: the event loop was %.0f ms late, the limit is %d ms",
                overload.load.name.lower(),
                lag_ms,
                overload.limit_ms,
            )
