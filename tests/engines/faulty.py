"""kvlease's connector with faults put in by hand, for tests: `kv_connector_module_path` names this module instead.

A request asks for faults in `kv_transfer_params["fault"]`; requests that ask for none are served as by the product.
A fault point makes a race likely; a break takes one guarantee away, so that a test shows that it would notice. None of
this is in the product: everything here wraps it.

    hold_ms: N                  start this request's READ so much after it was decided
    break: seal_not_checked     use what was read without looking at the seal
    break: mapped_from_tail     take the lender's blocks from the end of the lease
    break: callback_per_lease   (when lending) a reuse callback for this lease alone, instead of the shared one
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvlease.connector.lender_effects import Unpin
from kvlease.connector.plugin import NixlConnector as Connector
from kvlease.connector.prover import ReadSeals, Release
from kvlease.connector.vllm_metadata import attach_orders, attached_orders
from kvlease.registry.values import EndReason

SEAL_NOT_CHECKED = "seal_not_checked"
MAPPED_FROM_TAIL = "mapped_from_tail"
CALLBACK_PER_LEASE = "callback_per_lease"


def _fault(request: Any) -> Mapping[str, Any]:
    return (request.kv_transfer_params or {}).get("fault") or {}


class NixlConnector(Connector):
    """The connector, with what requests ask for."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_worker is not None:
            _FaultyReads(self.connector_worker)
        if self.connector_scheduler is not None:
            _FaultyOrders(self.connector_scheduler)


class _FaultyOrders:
    """Scheduler's side: tells the worker what a request asked for, and breaks mapping and callbacks."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._faults: dict[str, Mapping[str, Any]] = {}
        self._alone: set[str] = set()
        self._allocated, scheduler._allocated = scheduler._allocated, self.allocated
        self._build, scheduler.build_connector_meta = scheduler.build_connector_meta, self.build_connector_meta
        self._finished, scheduler._finished = scheduler._finished, self.finished

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._allocated(request, blocks, num_external_tokens)
        order = self._scheduler._orders.get(request.request_id)
        if order is None:
            return
        self._faults[request.request_id] = _fault(request)
        if _fault(request).get("break") == MAPPED_FROM_TAIL:
            read = self._scheduler._borrowing._stories[request.request_id].read
            order[0]["remote_block_ids"] = tuple(
                list(group[-len(local) :]) for group, local in zip(read.content.block_ids, order[1], strict=True)
            )

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = self._build(scheduler_output)
        metadata.faults, self._faults = self._faults, {}
        return metadata

    def finished(self, request: Any, *rest: Any) -> None:
        lending = self._scheduler._lending
        if _fault(request).get("break") != CALLBACK_PER_LEASE or lending is None:
            self._finished(request, *rest)
            return
        before = set(lending._holder._held)
        self._finished(request, *rest)
        self._alone |= set(lending._holder._held) - before
        if "carry" not in vars(self):
            self.carry, lending._carry_out = lending._carry_out, self.carry_out

    def carry_out(self, effects: Any) -> None:
        """A lapse of a marked lease registers a closure that ends this lease alone; the last one on a block wins."""
        lending = self._scheduler._lending
        for effect in effects:
            if isinstance(effect, Unpin) and effect.lease_id in self._alone:
                lease_id = effect.lease_id
                lending._pool.unpin_blocks(
                    reversed(lending._blocks(effect.blocks)),
                    lambda _, lease_id=lease_id: self.carry(lending._holder.end(lease_id, EndReason.REUSED)),
                )
            else:
                self.carry([effect])


class _FaultyReads:
    """Worker's side: holds READs back, and releases them unproven."""

    def __init__(self, worker: Any) -> None:
        self._held: list[tuple[float, str, Any, Any]] = []
        self._unchecked: set[str] = set()
        self._start, worker.start_load_kv = worker.start_load_kv, self.start_load_kv
        self._prover = worker._kvl_prover
        self._landed, self._prover.landed = self._prover.landed, self.landed

    def start_load_kv(self, metadata: Any) -> None:
        faults = getattr(metadata, "faults", {})
        now = time.monotonic()
        for request_id, order in attached_orders(metadata).items():
            fault = faults.get(request_id, {})
            if fault.get("break") == SEAL_NOT_CHECKED:
                self._unchecked.add(request_id)
            self._held.append(
                (now + fault.get("hold_ms", 0) / 1000, request_id, order, metadata.reqs_to_recv.pop(request_id))
            )
        ready = [item for item in self._held if item[0] <= now]
        self._held = [item for item in self._held if item[0] > now]
        attach_orders(metadata, {request_id: order for _, request_id, order, _ in ready})
        metadata.reqs_to_recv.update({request_id: meta for _, request_id, _, meta in ready})
        self._start(metadata)

    def landed(self, request_id: str, now_ms: int, ranks: Any = None) -> ReadSeals | Release:
        if request_id in self._unchecked:
            self._prover._loads.pop(request_id)
            return Release(request_id=request_id, reason=None)
        verdict: ReadSeals | Release = self._landed(request_id, now_ms, ranks)
        return verdict
