"""A slice of what `python -m tests.chaos` runs at length; and runs with a rule left out, in which it finds something.

A process of its own, because it runs in network namespaces of its own.
"""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.chaos.party import REPOSITORY

pytestmark = [pytest.mark.chaos, pytest.mark.nixl, pytest.mark.timeout(300)]

LIMIT_S = 240.0


async def chaos(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.chaos",
        *arguments,
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = said.decode(errors="replace")
    print(text)
    return process.returncode or 0, text


async def test_nothing_is_wrong_whatever_fails() -> None:
    status, said = await chaos("--minutes", "1", "--seed", "20")
    assert status == 0, said[-6_000:]
    assert "nothing was wrong" in said


async def test_a_replica_that_answers_without_contact_is_found_out() -> None:
    """Members are stopped for longer than the bound: a replica that does not look at its age answers all the time."""
    broken = ("--break-registry", "staleness_not_checked", "--max-staleness-ms", "1000", "--only", "store_away")
    status, said = await chaos("--minutes", "0.3", "--seed", "1", *broken)
    assert status == 1, said[-6_000:]
    assert "after it lost the store" in said


async def test_a_home_that_does_not_carry_out_ends_of_others_is_found_out() -> None:
    broken = ("--break-registry", "ends_not_echoed", "--max-staleness-ms", "1000", "--only", "stop_borrower")
    status, said = await chaos("--minutes", "0.25", "--seed", "3", *broken)
    assert status == 1, said[-6_000:]
    assert "acknowledged its end" in said or "lacks" in said


async def test_a_borrower_that_does_not_read_seals_is_found_out() -> None:
    status, said = await chaos("--minutes", "0.5", "--seed", "1", "--break", "seal_not_read", "--only", "stop_borrower")
    assert status == 1, said[-6_000:]
    assert "used blocks with wrong words" in said
