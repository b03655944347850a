"""Publications as they arrive, good and bad: the good ones go on, the bad ones are answered in their place.

Shared by the `Publish` rpc and by sessions. Invariant: one result for each item, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvlease.registry.errors import InvalidRequest
from kvlease.registry.values import LeaseId, Publication, PublishResult, PublishStatus
from kvlease.registry.wire import decode_publication
from kvlease.registry.wire_checks import check_batch
from kvlease.v1 import registry_pb2 as pb


class Publications:
    """The items of one message: `good` ones decoded, and for each of the others why not."""

    def __init__(self, items: Sequence[pb.PublishItem]) -> None:
        """Raises InvalidRequest if there are more than MAX_BATCH."""
        if items:
            check_batch("leases", len(items))
        self.good: list[Publication] = []
        self._refused: list[PublishResult | None] = []
        for item in items:
            try:
                self.good.append(decode_publication(item))
                self._refused.append(None)
            except InvalidRequest as error:
                self._refused.append(
                    PublishResult(lease_id=LeaseId(item.lease_id), status=PublishStatus.INVALID, message=error.message)
                )

    def results(self, of_good: Sequence[PublishResult]) -> list[PublishResult]:
        """One result for each item, in order, given those of the good ones."""
        rest: Iterator[PublishResult] = iter(of_good)
        return [refused if refused is not None else next(rest) for refused in self._refused]
