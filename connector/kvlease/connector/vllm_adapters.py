"""The LoRA adapters of vLLM's requests and of its calls to load one, as `adapters.py` knows them.

Only translation here. Invariant: an adapter is noted before a worker can load it, since a worker learns of it from a
request that was seen here, or from a call that was heard here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlease.connector.adapters import NO_ADAPTER, Adapter, Adapters, AdapterUnknown, AdapterVersion

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


class RequestAdapters:
    """Adapters of one engine's requests."""

    def __init__(self, config: VllmConfig) -> None:
        lora = config.lora_config
        self._format = "" if lora is None else f"{lora.lora_dtype} {sorted(lora.target_modules or ())}"
        self._adapters = Adapters()

    def loading(self, lora: LoRARequest) -> None:
        """The engine is about to tell its workers to load it."""
        self._adapters.loading(self._adapter(lora), again=lora.load_inplace, now=True)

    def version(self, request: Request) -> AdapterVersion | AdapterUnknown:
        lora = request.lora_request
        return NO_ADAPTER if lora is None else self._adapters.version(self._adapter(lora))

    def forgotten(self) -> None:
        self._adapters.forgotten()

    def close(self) -> None:
        self._adapters.close()

    def _adapter(self, lora: Any) -> Adapter:
        return Adapter(
            number=lora.lora_int_id,
            name=lora.lora_name,
            path=lora.lora_path,
            format=f"{self._format} {lora.is_3d_lora_weight}",
        )
