"""Keeps Python's garbage collector from walking over every lease: a process-wide choice, for a registry's own process.

A full collection looks at every container there is: with a million leases a pause of about a second, in which no
resolve is answered and heartbeats go stale. Leases are in no reference cycle; they go when the last reference goes.
So whatever has survived one full collection is frozen: later ones pass over it and look at what came since.
Price: a cycle that dies after it was frozen is never freed. Frozen cycles are those of streams that were open during
a full collection, a few kilobytes each, once.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Final

THRESHOLDS: Final = (5_000, 4, 4)
"""New containers to a collection of the youngest, and how many of those to one of the next age. So a full one, which
comes after all that was there before is frozen, looks at some 100 000: less than 10 ms."""

_OLDEST: Final = 2


def freeze_survivors() -> None:
    """From now on, in this process. Call it once everything is imported; calling it again changes nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    if _freeze not in gc.callbacks:
        gc.callbacks.append(_freeze)


def _freeze(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == _OLDEST:
        gc.freeze()
