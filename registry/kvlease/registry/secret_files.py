"""Reading certificates, keys and tokens from files: who else may touch them, how large they are, whether they changed.

No meaning of any content here. Blocking: small local files.
Invariant: no message repeats anything that a file contains.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 1_048_576
"""Of one file; certificate bundles have tens of kilobytes."""
RELOAD_S: Final = 1.0
"""Between two looks at whether files have changed."""

Signature = tuple[tuple[int, int, int, int], ...]


class FileUnusable(ValueError):
    """A file cannot be read or must not be trusted; the message names it and says what to change."""


def signature(paths: Sequence[Path]) -> Signature:
    """Differs once a file was replaced or rewritten. Raises FileUnusable."""
    seen = []
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise FileUnusable(f"{path}: {error.strerror or error}") from error
        seen.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(seen)


def read_public(path: Path) -> bytes:
    """A certificate. Raises FileUnusable."""
    return _read(path, forbidden=stat.S_IWOTH)


def read_secret(path: Path) -> bytes:
    """A key, a token, or what decides about them: others must not read it, nor the group write it.

    The group may read: that is how containers hand secrets to a process that is not root. Raises FileUnusable.
    """
    return _read(path, forbidden=stat.S_IRWXO | stat.S_IWGRP)


def _read(path: Path, *, forbidden: int) -> bytes:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise FileUnusable(f"{path}: not a regular file")
            if status.st_mode & forbidden:
                mode = stat.S_IMODE(status.st_mode)
                raise FileUnusable(f"{path}: too many may touch it (mode {mode:04o}); try: chmod 600 {path}")
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FileUnusable(f"{path}: {error.strerror or error}") from error
    if len(content) > MAX_BYTES:
        raise FileUnusable(f"{path}: more than {MAX_BYTES} bytes")
    return content
