"""Exit statuses of `kvlease`, the same for every command.

Documented in `kvlease --help`. Scripts rest on them: a number never changes its meaning.
"""

from __future__ import annotations

from typing import Final

DONE: Final = 0
FAILED: Final = 1
"""The registry could not be reached, refused, does not serve, or an address could not be served."""
USAGE: Final = 2
"""A flag, an argument or a setting is wrong."""
MISS: Final = 3
"""`kvlease resolve` found no lease."""

PROBLEMS: Final = 4
"""`kvlease doctor` found something to change."""

TEXT: Final = (
    "exit status: 0 done; 1 failed (unreachable, refused, address in use); 2 wrong usage; 3 resolve: a miss; "
    "4 doctor: something to change"
)
