"""kvlease's connector for vLLM: keeps the KV of finished turns on decode engines, reads it back on prefill engines.

vLLM finds `NixlConnector` here by `kv_connector_module_path`. The cores (lender, borrower, prover, digests, record,
seal) import neither vLLM nor NIXL, so the class is loaded only when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlease.connector.plugin import NixlConnector

__all__ = ["NixlConnector"]


def __getattr__(name: str) -> object:
    if name != "NixlConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvlease.connector import plugin
    except ModuleNotFoundError as error:
        raise ImportError(
            f"kvlease.connector needs an environment with vLLM and NIXL: {error.name} is not installed. "
            "Install kvlease into the environment that runs the engine"
        ) from error
    return plugin.NixlConnector
