"""stdout as commands write to it: line by line, as text that a terminal may have, and with an end if that fails.

Invariant: an answer that could not be written is never taken for one that was; a reader who has enough of it may go.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from kvlease.cli.visible import visible


class OutputLost(Exception):
    """stdout takes nothing; the message says why. A reader that has gone is BrokenPipeError."""


def say(line: str) -> None:
    """Raises OutputLost, BrokenPipeError."""
    with _open() as out:
        out.write(visible(line) + "\n")


def flush() -> None:
    """All that was said is written when this returns. Raises OutputLost, BrokenPipeError."""
    with _open() as out:
        out.flush()


def abandon() -> None:
    """What was said and not written is forgotten, so that the interpreter does not try again when it ends."""
    if sys.stdout is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextmanager
def _open() -> Iterator[TextIO]:
    if sys.stdout is None:
        raise OutputLost("stdout is closed")
    try:
        yield sys.stdout
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(f"stdout: {error.strerror or error}") from error
