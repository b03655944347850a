"""The registry with one of its rules left out on purpose: `python -m tests.chaos.breaks RULE registry FLAGS...`.

Nothing here is reachable from the product. A chaos run whose registries are started by this must find something wrong,
or its judge is blind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from kvlease import cli
from kvlease.registry.replica import Replica
from kvlease.registry.table_changes import Draft, LeaseGone, LeasePut, StoreChange
from kvlease.registry.table_replicas import Replicas


def staleness_not_checked() -> None:
    """A replica that lost the store goes on answering."""
    Replica.check = lambda self: None  # type: ignore[method-assign]


def ends_not_echoed() -> None:
    """A home does not carry out ends that were asked for elsewhere."""
    carry_out: Callable[..., Iterable[StoreChange]] = Replicas._let_go

    def without(self: Replicas, draft: Draft, gone: LeaseGone, now_ms: int, *, expired: bool) -> Iterable[StoreChange]:
        lease = self._ledger.index.by_id.get(gone.lease_id)
        if lease is None or lease.holder.elsewhere or expired:
            return carry_out(self, draft, gone, now_ms, expired=expired)
        return ()

    Replicas._let_go = without  # type: ignore[method-assign]


def others_not_heard() -> None:
    """A replica does not take in leases of other homes."""
    take_in: Callable[..., Iterable[StoreChange]] = Replicas._take_in

    def without(self: Replicas, draft: Draft, put: LeasePut, now_ms: int) -> Iterable[StoreChange]:
        state = self._roster.engines.get(put.engine_id)
        return () if state is not None and state.elsewhere else take_in(self, draft, put, now_ms)

    Replicas._take_in = without  # type: ignore[method-assign]


BREAKS: Final[Mapping[str, Callable[[], None]]] = {
    made.__name__: made for made in (staleness_not_checked, ends_not_echoed, others_not_heard)
}


def main(arguments: list[str]) -> Any:
    BREAKS[arguments[1]]()
    sys.argv = [arguments[0], *arguments[2:]]
    return cli.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
