"""What an adapter's folder holds: a signature that is cheap to take, and a digest of every byte.

No vLLM. A signature changes with every change of a file, since nobody can set back a file's change time; only files
that changed within the clock's last tick may look the same afterwards, so those have no signature.

Invariant: two folders with the same digest hold the same files; the same signature before and after a digest was taken
means that the digest is of what was there all the while.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from typing import Final

MAX_FILES: Final = 64
MAX_BYTES: Final = 8 * 1024**3
"""Larger folders are no adapters; reading them would take minutes."""
SETTLED_NS: Final = 20_000_000
"""Older than a tick of any kernel's clock."""

_CHUNK: Final = 1024 * 1024
_DOMAIN: Final = b"kvlease adapter 1\0"

Signature = tuple[tuple[str, int, int, int, int, int, int], ...]


def signature(folder: str) -> Signature | None:
    """What can be seen of the folder's files from outside; None if they cannot be told apart from others by it."""
    settled_ns = time.time_ns() - SETTLED_NS
    found: list[tuple[str, int, int, int, int, int, int]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                seen, link = entry.stat(), entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(seen.st_mode):
                    continue
                changed_ns = max(seen.st_ctime_ns, link.st_ctime_ns)
                if changed_ns > settled_ns or len(found) == MAX_FILES:
                    return None
                found.append(
                    (
                        entry.name,
                        seen.st_dev,
                        seen.st_ino,
                        seen.st_size,
                        seen.st_mtime_ns,
                        seen.st_ctime_ns,
                        link.st_ctime_ns,
                    )
                )
    except OSError:
        return None
    return tuple(sorted(found)) if found and sum(item[3] for item in found) <= MAX_BYTES else None


def settled_signature(folder: str) -> Signature | None:
    """The same for files that may have changed just now: waits once, for SETTLED_NS, if that is what it takes."""
    seen = signature(folder)
    if seen is None and os.path.isdir(folder):
        time.sleep(SETTLED_NS / 1e9)
        seen = signature(folder)
    return seen


def digest(folder: str, names: tuple[str, ...]) -> bytes | None:
    """SHA-256 over these files' names and bytes; None if one cannot be read. Takes a second for about a gigabyte."""
    whole = hashlib.sha256(_DOMAIN)
    try:
        for name in sorted(names):
            one = hashlib.sha256()
            with open(os.path.join(folder, name), "rb") as file:
                while chunk := file.read(_CHUNK):
                    one.update(chunk)
            whole.update(len(name.encode()).to_bytes(4, "little") + name.encode() + one.digest())
    except OSError:
        return None
    return whole.digest()
