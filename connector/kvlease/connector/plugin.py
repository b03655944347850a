"""The class that vLLM loads: stock's NIXL connector with kvlease's scheduler and worker sides.

Configured as `"kv_connector": "NixlConnector", "kv_connector_module_path": "kvlease.connector"`: the module path wins
over the built-in class, and whatever vLLM decides by that name stays in force.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvlease.connector import engine_facts
from kvlease.connector.settings import ConnectorSettings, SettingsInvalid
from kvlease.connector.vllm_scheduler import KvleaseScheduler
from kvlease.connector.vllm_worker import KvleaseWorker
from kvlease.registry.clock import SystemClock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.version import __version__ as vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger(__name__)


def _log_as_the_engine_does() -> None:
    """vLLM configures its own loggers only; kvlease's go where the operator looks."""
    ours, theirs = logging.getLogger("kvlease"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.getEffectiveLevel())


class NixlConnector(NixlBaseConnector):  # type: ignore[misc]  # vLLM is not typed here
    """kvlease in a vLLM engine. Raises SettingsInvalid, with what to change, for an engine that it cannot serve."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_the_engine_does()
        given = vllm_config.kv_transfer_config.kv_connector_extra_config.get("kvlease", {})
        if not isinstance(given, dict):
            raise SettingsInvalid('kv_connector_extra_config["kvlease"] must be an object of settings')
        settings = ConnectorSettings.load(given)
        engine_facts.check_engine(vllm_config, kv_cache_config, settings, vllm_version)
        lends, borrows = engine_facts.roles(vllm_config, settings)
        side: dict[str, Any] = {"settings": settings, "clock": SystemClock(), "lends": lends, "borrows": borrows}
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = KvleaseScheduler(vllm_config, self.engine_id, kv_cache_config, **side)
        else:
            self.connector_worker = KvleaseWorker(vllm_config, self.engine_id, kv_cache_config, **side)
        log.info("kvlease: engine %s lends: %s, borrows: %s", self.engine_id, lends, borrows)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.connector_scheduler.bind(kv_cache_manager)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert isinstance(self._connector_metadata, NixlConnectorMetadata)
        self.connector_worker.start_load_kv(self._connector_metadata)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.connector_worker.build_reports()

    def reset_cache(self) -> bool | None:
        """Ends every lease; True, since nothing of kvlease is left in the cache then."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.reset_cache()
        return True
