"""Which of vLLM's requests may take part in leases: those whose digests say all that their KV depends on.

Reads vLLM's request objects; decides nothing else.
Invariant: a request that is refused here is computed as if there were no lease, and says why in a counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.v1.request import Request

WEIGHTS: Final = "kvlease_weights"
"""In the transfer parameters that a prefill engine hands over, beside stock's."""
UNKNOWN: Final = "unknown"


def plain(request: Request) -> bool:
    """Whether digests cover all that the request's KV depends on. Adapters can be reloaded in place under one name,
    and embeddings given as such are nobody's to share: both are computed."""
    return request.lora_request is None and request.prompt_embeds is None and not request.skip_reading_prefix_cache


def not_lent(request: Request, weights: str, *, weights_known: bool) -> str | None:
    """Why the turn is not lent, as the counter says it; None if it may be. `weights`: the version of this engine's."""
    if not plain(request):
        return "unsupported"
    prefilled_by = (request.kv_transfer_params or {}).get(WEIGHTS)
    if not weights_known or prefilled_by not in (None, weights):
        return "weights_changed"
    return None


def name_weights(handed_over: dict[str, Any] | None, weights: str, *, weights_known: bool) -> None:
    """Says in what a prefill hands over which weights its KV is of; a stock engine does not, and is believed."""
    if handed_over is not None:
        handed_over[WEIGHTS] = weights if weights_known else UNKNOWN
