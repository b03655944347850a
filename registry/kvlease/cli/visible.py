"""Text of others as a terminal may have it: engines and registries say what they like, and a terminal obeys it.

Pure. Invariant: what comes out is one line without control characters, and JSON stays JSON with the same meaning.
"""

from __future__ import annotations

import json


def visible(text: str) -> str:
    """`text` with each character that would not be seen, or would move others, as JSON escapes it."""
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else _escaped(x) for x in text)


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1] if character != "\x7f" else "\\u007f"
