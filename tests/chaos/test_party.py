"""What is made of a process of a chaos run that ends by itself.

No fleet: the process is a few lines of Python that end as a test wants.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.chaos.network import Network
from tests.chaos.party import UCX_ABORT, Party
from tests.integration.registry_peer import until

DIES = "import os, sys; print(sys.argv[1], file=sys.stderr, flush=True); os.abort()"


@pytest.mark.parametrize(
    ("words", "excused"),
    [
        (f"[vm:19351:0:19378] ucp_request.inl:356  {UCX_ABORT}", True),
        (f"{UCX_ABORT}\nIndexError: pop from an empty deque", False),
        ("Segmentation fault", False),
        ("", False),
    ],
)
async def test_only_an_abort_of_ucx_is_excused(tmp_path: Path, words: str, excused: bool) -> None:
    party = Party("d0", [sys.executable, "-c", DIES, words], Network(["d0"]), tmp_path, on_line=lambda _: None)
    await party.start()
    await until(lambda: bool(party.died), "its end")
    assert party.ended_by_ucx is excused
    await party.start()
    assert not party.ended_by_ucx, "that was the one before"
    await until(lambda: bool(party.died), "its end")
