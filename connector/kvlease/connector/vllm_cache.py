"""Where kvlease stands between vLLM's scheduler and its cache manager: leases give way before anything else does.

vLLM tells a connector neither how many blocks a request lacks (running or waiting) nor that the prefix cache is about
to be reset, and lets no connector say what must not go into that cache. So two methods of the one cache manager that
the connector was given, and one of its coordinator, are wrapped on the instance. vLLM's classes stay as they are. Runs
on the engine's thread.

Invariant: the engine is told "no room" or "blocks are in use" only if it would be told so without any lease.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

FIRST_BLOCKS: Final = 16
"""Blocks to ask leases for at the first refusal, twice as many at each further one: what is missing is not known."""


def let_leases_give_way(manager: Any, block_tokens: int, give_way: Callable[[int, int], bool]) -> None:
    """Asks leases for blocks when `manager.allocate_slots` finds none, and tries again within the same call.

    `give_way(more_blocks, least_blocks)` gives about `more_blocks` back and says whether it gave any. The request needs
    `least_blocks` free ones or more: leases that cannot help it need not end. A refused allocation leaves nothing
    behind that a repetition would double.
    """
    allocate = manager.allocate_slots

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        blocks = allocate(request, num_new_tokens, *args, **kwargs)
        if blocks is not None:
            return blocks
        tokens = num_new_tokens + kwargs.get("num_external_computed_tokens", 0)
        if kwargs.get("full_sequence_must_fit"):
            known = request.num_computed_tokens + kwargs.get("num_new_computed_tokens", 0)
            tokens = max(tokens, request.num_tokens - known)
        more = FIRST_BLOCKS
        while blocks is None and give_way(more, tokens // block_tokens):
            more *= 2
            blocks = allocate(request, num_new_tokens, *args, **kwargs)
        return blocks

    manager.allocate_slots = allocate_slots


def watch_resets(manager: Any, before: Callable[[], None], cleared: Callable[[], None]) -> None:
    """Ends leases (`before`) when the operator resets the prefix cache, which is refused while a block is referenced.

    Serves `/reset_prefix_cache`, a pause that clears the cache, and sleep, all of which come through here before the
    engine's memory is touched. `cleared` is called once the cache is empty.
    """
    reset = manager.reset_prefix_cache

    def reset_prefix_cache() -> Any:
        before()
        done = reset()
        if done:
            cleared()
        return done

    manager.reset_prefix_cache = reset_prefix_cache


def keep_out(manager: Any, requests: Collection[str]) -> None:
    """No block of these requests can be found in the prefix cache: theirs stay as they are where that cache is off.

    What such a request has found there itself can still be found. `requests`: as their owner changes them.
    """
    coordinator = manager.coordinator
    cache = coordinator.cache_blocks

    def cache_blocks(request: Any, *args: Any, **kwargs: Any) -> None:
        if request.request_id not in requests:
            cache(request, *args, **kwargs)

    coordinator.cache_blocks = cache_blocks


def blocks_of(manager: Any, request_id: str) -> tuple[list[Any], ...]:
    """The manager's own lists of the blocks that a request holds, one per KV group.

    When the request is freed, the references of the blocks that are still listed go back to the pool. So a lease need
    not take references of its own on thousands of blocks, only for the engine to give up as many right afterwards.
    """
    return tuple(group.req_to_blocks.get(request_id, []) for group in manager.coordinator.single_type_managers)


def is_empty(manager: Any) -> bool:
    """Whether the engine holds no KV: no block is referenced and none can be found in the prefix cache."""
    pool = manager.block_pool
    return bool(pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 and not len(pool.cached_block_hash_to_block))
