"""The heap of a registry: what has survived a full collection is not looked at again.

In a process of its own, since the collector is one for all.
"""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
from kvlease.registry.heap import freeze_survivors

freeze_survivors()
freeze_survivors()
frozen = gc.get_freeze_count()
held = [[] for _ in range(1_000)]
gc.collect()
print(gc.get_freeze_count() - frozen, len(gc.callbacks))
cycle = []
cycle.append(cycle)
del cycle
print(gc.collect())
"""


def test_survivors_of_a_full_collection_are_frozen_and_young_cycles_still_go() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    grown, callbacks, collected = map(int, run.stdout.split())
    assert grown >= 1_000, "what lived through a full collection"
    assert callbacks == 1, "called twice, it freezes once"
    assert collected >= 1, "a cycle made since"
