"""What holds for every test on engines: a fleet that closes in good order is judged for leaks.

Nothing else is shared here. Invariant: leaving the tests leaves the judge as it was.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines import leaks


@pytest.fixture(scope="session", autouse=True)
def leaks_are_judged() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaks, "ON", True)
        yield
