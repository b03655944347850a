"""The seal table: made by one process, mapped by another, readable in an order that proves how it was written.

Real files and real processes; no NIXL. `tests/nixl` has the table under READs.
"""

from __future__ import annotations

import mmap
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvlease.connector.seal import BROKEN, HASH_BYTES, HEADER_BYTES, SLOT_BYTES, pack_value, slot_offset, table_bytes
from kvlease.connector.seal_table import PREFIX, SealTable, SealTableUnavailable, sweep

HASH = bytes(range(HASH_BYTES))
WAIT_S = 60

OTHER_PROCESS = """
import sys
from pathlib import Path
from kvlease.connector.seal_table import SealTable
table = SealTable.attach(Path(sys.argv[1]))
print(table.address, table.slots, table.read(3).hex(), flush=True)
table.break_seal(3)
table.write_hash(4, bytes(24))
table.write_value(4, 99)
"""

OWNER = """
import sys, time
from pathlib import Path
from kvlease.connector.seal_table import SealTable
print(SealTable.create(4, Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""

WRITER = """
import struct, sys
from pathlib import Path
from kvlease.connector.seal_table import SealTable
table = SealTable.attach(Path(sys.argv[1]))
value = 0
print("writing", flush=True)
while True:
    value += 1
    table.write_hash(1, struct.pack("<QQQ", value, value, value))
    table.write_value(1, value)
    table.break_seal(1)
"""


def python(script: str, argument: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, str(argument)], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[SealTable]:
    made = SealTable.create(16, tmp_path)
    yield made
    made.close()


def test_a_new_table_is_all_broken_and_its_owners_alone(table: SealTable) -> None:
    assert stat.S_IMODE(table.path.stat().st_mode) == 0o600
    assert table.path.stat().st_size == table.size == table_bytes(16)
    assert all(table.read(slot) == bytes(SLOT_BYTES) for slot in range(16))


def test_values_are_aligned_words_at_the_addresses_that_records_name(table: SealTable) -> None:
    assert table.address % mmap.PAGESIZE == 0
    assert all((table.address + slot_offset(slot)) % SLOT_BYTES == 0 for slot in range(16))


def test_a_seal_is_its_value_and_then_its_hash(table: SealTable) -> None:
    table.write_hash(5, HASH)
    table.write_value(5, (1 << 64) - 1)
    assert table.read(5) == pack_value((1 << 64) - 1) + HASH
    assert table.read(4) == table.read(6) == bytes(SLOT_BYTES)


def test_breaking_changes_the_value_of_that_slot_alone(table: SealTable) -> None:
    for slot in (0, 1, 15):
        table.write_hash(slot, HASH)
        table.write_value(slot, 7 + slot)
    table.break_seal(1)
    assert table.read(1) == pack_value(BROKEN) + HASH
    assert table.read(0) == pack_value(7) + HASH
    table.break_all()
    assert all(table.read(slot)[:8] == pack_value(BROKEN) for slot in range(16))


def test_another_process_sees_and_breaks_the_same_seals(table: SealTable) -> None:
    table.write_hash(3, HASH)
    table.write_value(3, 42)
    with python(OTHER_PROCESS, table.path) as other:
        said, _ = other.communicate(timeout=WAIT_S)
    address, slots, slot = said.split()
    assert int(address) == table.address, "records name addresses of the owner, not of the process that writes them"
    assert int(slots) == 16
    assert bytes.fromhex(slot) == pack_value(42) + HASH
    assert table.read(3) == pack_value(BROKEN) + HASH
    assert table.read(4) == pack_value(99) + bytes(HASH_BYTES)


def test_whoever_sees_a_value_finds_its_hash(table: SealTable) -> None:
    """A writer counts up; a reader that loads the value first must never find an older hash beside it."""
    value_at = slot_offset(1)
    whole = 0
    with python(WRITER, table.path) as writer, table.path.open("rb") as file:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
                value_of, hash_of = struct.Struct("<Q").unpack_from, struct.Struct("<QQQ").unpack_from
                for _ in range(200_000):
                    (value,) = value_of(pages, value_at)
                    words = hash_of(pages, value_at + 8)
                    if value:
                        whole += 1
                        assert min(words) >= value, f"value {value} stood beside the hash of {min(words)}"
        finally:
            writer.kill()
    assert whole > 1_000, "the seal was hardly ever seen whole: nothing was shown"


def test_closing_removes_the_owners_file_only(tmp_path: Path) -> None:
    owner = SealTable.create(2, tmp_path)
    SealTable.attach(owner.path).close()
    assert owner.path.exists()
    owner.close()
    assert list(tmp_path.iterdir()) == []
    owner.close()


def test_a_table_that_cannot_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(SealTableUnavailable, match="cannot make a seal table"):
        SealTable.create(1 << 50, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SealTableUnavailable, match="cannot make a seal table"):
        SealTable.create(1, tmp_path / "missing")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        bytes(HEADER_BYTES),
        bytes(table_bytes(4)),
        struct.pack("<8sQQ", b"kvlseal1", 4, 4096).ljust(table_bytes(3), b"\0"),
        struct.pack("<8sQQ", b"kvlseal0", 4, 4096).ljust(table_bytes(4), b"\0"),
    ],
    ids=["empty", "short", "header_of_zeros", "zeros", "truncated", "other_version"],
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(SealTableUnavailable):
        SealTable.attach(path)
    with pytest.raises(SealTableUnavailable, match="on one host"):
        SealTable.attach(tmp_path / "missing")


def test_only_tables_of_dead_owners_are_swept(tmp_path: Path) -> None:
    mine = SealTable.create(2, tmp_path)
    stranger = tmp_path / "stranger-1-2"
    stranger.touch()
    odd = tmp_path / f"{PREFIX}-notapid-1"
    odd.touch()
    with python(OWNER, tmp_path) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        assert sweep(tmp_path) == 0
        assert theirs.exists()
        os.kill(owner.pid, signal.SIGKILL)
    assert theirs.exists(), "a killed owner leaves its file behind"
    assert sweep(tmp_path) == 1
    assert sorted(tmp_path.iterdir()) == sorted([mine.path, stranger, odd])
    mine.close()


def test_a_live_table_of_another_pid_namespace_stays(tmp_path: Path) -> None:
    """Its owner's pid means nothing here; its lock does."""
    with python("", tmp_path) as gone:
        gone.wait(WAIT_S)
    table = SealTable.create(2, tmp_path)
    elsewhere = tmp_path / f"{PREFIX}-{gone.pid}-00"
    table.path.rename(elsewhere)
    assert sweep(tmp_path) == 0
    assert elsewhere.exists()
