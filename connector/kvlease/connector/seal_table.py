"""One rank's seal table: a file in /dev/shm that the worker registers with NIXL and the scheduler's process maps too.

Owns the file and its mapping; the layout of a slot is `seal.py`'s. The worker makes the table before it registers its
KV caches; whoever decides about leases writes and breaks seals through a second mapping of the same pages, so a break
is visible to a reader's NIC or copy thread as soon as the store is.

Invariant: values are aligned 64-bit words, stored in one move, and `break_seal` stores the value alone. A value is
written by the thread that decides about leases; the hash beside it may be written by another one, before the record is
published.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import struct
from pathlib import Path
from typing import Final, Self

from kvlease.connector.seal import BROKEN, HEADER_BYTES, SLOT_BYTES, VALUE_BYTES, slot_offset, table_bytes

DIRECTORY: Final = Path("/dev/shm")
PREFIX: Final = "kvlease-seal"
_HEADER: Final = struct.Struct("<8sQQ")
_MAGIC: Final = b"kvlseal1"


class SealTableUnavailable(RuntimeError):
    """The table cannot be made or mapped: the engine must not lend."""


class SealTable:
    """A mapping of one rank's table. `address` is where the *owning* process has it, which is what records name."""

    def __init__(self, path: Path, mapping: mmap.mmap, slots: int, address: int, *, owner: bool) -> None:
        self.path = path
        self.slots = slots
        self.address = address
        self._mapping = mapping
        self._owner = owner
        self._words = memoryview(mapping).cast("Q")

    @classmethod
    def create(cls, slots: int, directory: Path = DIRECTORY) -> Self:
        """Makes a fresh, all-broken table named after this process; raises SealTableUnavailable."""
        path = directory / f"{PREFIX}-{os.getpid()}-{secrets.token_hex(8)}"
        size = table_bytes(slots)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # the mapping keeps the lock as long as this process lives
                os.posix_fallocate(descriptor, 0, size)
                mapping = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise SealTableUnavailable(f"cannot make a seal table of {size} bytes in {directory}: {error}") from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        _HEADER.pack_into(mapping, 0, _MAGIC, slots, address)
        return cls(path, mapping, slots, address, owner=True)

    @classmethod
    def attach(cls, path: Path) -> Self:
        """Maps a table made by another process on this host; raises SealTableUnavailable."""
        try:
            descriptor = os.open(path, os.O_RDWR)
            try:
                size = os.fstat(descriptor).st_size
                mapping = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise SealTableUnavailable(
                f"cannot map the worker's seal table {path}: {error}. Lending needs the engine's scheduler and workers "
                "on one host, sharing /dev/shm"
            ) from error
        magic, slots, address = _HEADER.unpack_from(mapping) if size >= HEADER_BYTES else (b"", 0, 0)
        if magic != _MAGIC or size != table_bytes(slots):
            raise SealTableUnavailable(f"{path} is not a seal table of this version")
        return cls(path, mapping, slots, address, owner=False)

    @property
    def size(self) -> int:
        return table_bytes(self.slots)

    def write_value(self, slot: int, value: int) -> None:
        """From here on the slot says that the blocks of a lease are untouched; which record that is, its hash says."""
        self._words[(HEADER_BYTES + slot * SLOT_BYTES) // 8] = value

    def write_hash(self, slot: int, record_hash: bytes) -> None:
        """Binds a record to the slot's value. No reader knows the value before the record is published."""
        start = slot_offset(slot)
        self._mapping[start + VALUE_BYTES : start + SLOT_BYTES] = record_hash

    def break_seal(self, slot: int) -> None:
        """After this, no reader finds the slot's value."""
        self._words[(HEADER_BYTES + slot * SLOT_BYTES) // 8] = BROKEN

    def break_all(self) -> None:
        for slot in range(self.slots):
            self.break_seal(slot)

    def read(self, slot: int) -> bytes:
        """The slot's 32 bytes, as a reader on this host would find them."""
        start = slot_offset(slot)
        return bytes(self._mapping[start : start + SLOT_BYTES])

    def close(self) -> None:
        """Unmaps nothing that NIXL may still serve: the pages go with the process; the owner unlinks the file."""
        if self._owner:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)


def sweep(directory: Path = DIRECTORY) -> int:
    """Removes tables of processes that are gone (killed engines leave theirs behind); returns how many.

    A pid says nothing about an engine in another pid namespace (containers that share the host's /dev/shm do not share
    its pids), so a table whose lock is held stays.
    """
    removed = 0
    for path in directory.glob(f"{PREFIX}-*-*"):
        pid = path.name.removeprefix(f"{PREFIX}-").split("-")[0]
        if not pid.isdigit() or Path(f"/proc/{pid}").exists():
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
            removed += 1
    return removed
