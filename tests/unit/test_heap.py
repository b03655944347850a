"""The heap of a registry: what has survived full collections is not looked at again once there is much of it.

In a process of its own, since the collector is one for all.
"""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
import weakref
from kvlease.registry.heap import MANY_SURVIVORS, freeze_survivors

class Call:
    def __init__(self):
        self.itself = self

freeze_survivors()
freeze_survivors()
frozen = gc.get_freeze_count()
call = Call()
gone = weakref.ref(call)
few = [[] for _ in range(1_000)]
gc.collect()
print(gc.get_freeze_count() - frozen, len(gc.callbacks))
del call
gc.collect()
print(int(gone() is None))
many = [[] for _ in range(MANY_SURVIVORS)]
gc.collect()
print(gc.get_freeze_count() - frozen)
cycle = Call()
gone = weakref.ref(cycle)
del cycle
gc.collect()
print(int(gone() is None), MANY_SURVIVORS)
"""


def test_many_survivors_are_frozen_and_cycles_that_lived_through_a_full_collection_still_go() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    grown, callbacks, gone, frozen, young_gone, many = map(int, run.stdout.split())
    assert grown == 0, "a few are looked at again"
    assert callbacks == 1, "called twice, it freezes once"
    assert gone, "a call that was open during a full collection, once it is over"
    assert frozen >= many, "what a million leases are made of"
    assert young_gone, "a cycle made since"
