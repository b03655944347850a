"""The commands of deploy/README.md, to be run as they are written there.

Only finds them; what they do is for the tests to see.
"""

from __future__ import annotations

import re

from tests.deploy.tools import DEPLOY


def commands(word: str) -> str:
    """The one block of shell commands that has `word` in it."""
    blocks = re.findall(r"```sh\n(.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    (found,) = [x for x in blocks if word in x]
    return str(found)
