"""Every double by its name, for the command line and the tests.

Nothing else. Invariant: no two have one name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.sim.breaks import LENDER_BREAKS, Straight
from tests.sim.breaks_replicas import REPLICA_BREAKS

BREAKS: Final[dict[str, Callable[[], Straight]]] = {double.name: double for double in (*LENDER_BREAKS, *REPLICA_BREAKS)}
