"""How a run of the tests ends: once everything is reported, at once. And how long an example may take: as it takes.

In this process are torch, several of vLLM's schedulers and NIXL's agents with their progress threads. Their libraries
were seen to crash the interpreter while it took itself apart (once in some thirty runs), after the last result had
been printed: that says nothing about what was tested, and would turn a good run into a bad one.
"""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import settings

settings.register_profile("kvlease", deadline=None)  # a busy machine is no defect; tests have time limits of their own
settings.load_profile("kvlease")

_status = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    status = config.stash.get(_status, None)
    if status is None:  # no session was run: a question to pytest itself
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
