"""Versions of the LoRA adapters that an engine uses: which bytes stand behind a name that may be given to others.

An engine loads an adapter from its folder, may drop it and load it again from there, or reload it in place. So a
version is the digest of the folder's files as they were before the engine could load them, and it holds only while
nothing in the folder has changed since. Digests are taken on a thread of their own.

Invariant: a version is given only if every load of the adapter so far, and none but those, read these very bytes.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NewType

from kvlease.connector.adapter_files import Signature, digest, settled_signature, signature

AdapterVersion = NewType("AdapterVersion", bytes)
"""32 bytes; empty: no adapter."""
NO_ADAPTER: Final = AdapterVersion(b"")
MAX_ADAPTERS: Final = 4_096
"""Adapters remembered at once; of those beyond it the version is not known."""


class AdapterUnknown(StrEnum):
    """Why an adapter has no version now, in the words of the counters."""

    UNKNOWN = "adapter_unknown"
    """Its files are not read yet, cannot be read, or have changed since the engine may have loaded them."""
    CHANGED = "adapter_changed"
    """It was reloaded with other weights: the engine's cache may hold KV of the earlier ones until it is reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter as the engine's requests name it. `format`: all else that decides what its bytes mean."""

    number: int
    name: str
    path: str
    format: str = ""


@dataclass(frozen=True, slots=True)
class _Loaded:
    adapter: Adapter
    signature: Signature | None
    digest: Future[bytes | None] | None
    """None: what the engine has loaded under this number cannot be told."""


class Adapters:
    """All adapters of one engine. Called on the engine's thread; never waits for a digest."""

    def __init__(self) -> None:
        self._loaded: dict[int, _Loaded] = {}
        """By the engine's number of the adapter."""
        self._last: dict[tuple[str, str], Signature | None] = {}
        """Of the files last loaded under a name and path, by which the engine's cache finds KV."""
        self._changed: set[tuple[str, str]] = set()
        """Names and paths under which other files were loaded since the engine's cache was last empty."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kvlease-adapters")

    def loading(self, adapter: Adapter, *, again: bool = False, now: bool = False) -> None:
        """The engine may load the adapter from now on; `again`: it will, even if it has it.

        `now`: it will at once, on this thread. Files that were written just before are then waited for (20 ms).
        """
        known = self._loaded.get(adapter.number)
        if known is not None and not again:
            if known.adapter != adapter:  # the engine takes the adapter that it has under this number for this one
                self._loaded[adapter.number] = _Loaded(adapter, None, None)
                self._changed.add((adapter.name, adapter.path))
            return
        if known is None and len(self._loaded) >= MAX_ADAPTERS:
            return
        seen = settled_signature(adapter.path) if now else signature(adapter.path)
        name = (adapter.name, adapter.path)
        if name in self._last and (seen is None or seen != self._last[name]):
            self._changed.add(name)
        self._last[name] = seen
        files = tuple(item[0] for item in seen) if seen else ()
        reading = self._reader.submit(digest, adapter.path, files) if files else None
        self._loaded[adapter.number] = _Loaded(adapter, seen, reading)

    def version(self, adapter: Adapter | None) -> AdapterVersion | AdapterUnknown:
        """What KV of requests with this adapter is computed with, if it is the only version that it can be of."""
        if adapter is None:
            return NO_ADAPTER
        self.loading(adapter)
        loaded = self._loaded.get(adapter.number)
        if loaded is None or loaded.digest is None or not loaded.digest.done():
            return AdapterUnknown.UNKNOWN
        files = loaded.digest.result()
        if files is None or signature(adapter.path) != loaded.signature:
            return AdapterUnknown.UNKNOWN
        if (adapter.name, adapter.path) in self._changed:
            return AdapterUnknown.CHANGED
        return AdapterVersion(hashlib.sha256(files + adapter.format.encode()).digest())

    def forgotten(self) -> None:
        """The engine's cache is empty: what it will hold is of the files loaded last."""
        self._changed.clear()

    def close(self) -> None:
        """Digests that nobody waits for are not taken."""
        self._reader.shutdown(wait=False, cancel_futures=True)
