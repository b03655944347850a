"""What commands refuse before they ask anybody: status 2, and one sentence that names the flag.

No registry is needed; none is there.
"""

from __future__ import annotations

import pytest

from tests.integration.cli_process import run
from tests.ports import free_port

NOWHERE = f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("watch --from-revision -1", "--from-revision: must be 0-"),
        ("watch --from-revision 99999999999999999999", "--from-revision: must be 0-"),
        ("watch --count -1", "--count: must be 0-"),
    ],
)
async def test_a_wrong_value_is_refused_in_a_sentence(given: str, said: str) -> None:
    outcome = await run(*given.split(), "--registry", NOWHERE)
    assert (outcome.status, outcome.out) == (2, "")
    assert said in outcome.err.splitlines()[-1]
