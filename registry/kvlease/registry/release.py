"""Which kvlease this is.

No behaviour. Reads the metadata of the installed distribution, so it is asked once and not at import.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "unknown"


def installed_version() -> str:
    """The version of the installed distribution, UNKNOWN if it runs from files alone."""
    try:
        return version("kvlease")
    except PackageNotFoundError:
        return UNKNOWN
