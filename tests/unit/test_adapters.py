"""Versions of adapters against real folders: a version is given only while every load can have read just these bytes.

No engine. Files are made older than a clock's tick by waiting for it once, since their change time cannot be set.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kvlease.connector.adapter_files import MAX_FILES, SETTLED_NS, digest, signature
from kvlease.connector.adapters import MAX_ADAPTERS, NO_ADAPTER, Adapter, Adapters, AdapterUnknown, AdapterVersion

WAIT_S = 10.0


def write(folder: Path, weights: bytes) -> Path:
    """An adapter's folder, as it is when nobody has touched it for a while."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    until(lambda: signature(str(folder)) is not None)
    return folder


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit, "nothing happened in time"
        time.sleep(SETTLED_NS / 1e9 / 10)


@pytest.fixture
def adapters() -> Iterator[Adapters]:
    made = Adapters()
    yield made
    made.close()


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    return Adapter(number=1, name="a", path=str(write(tmp_path / "a", b"one")))


def known(adapters: Adapters, adapter: Adapter) -> AdapterVersion:
    """Its version, once its files are read."""
    until(lambda: not isinstance(adapters.version(adapter), AdapterUnknown))
    version = adapters.version(adapter)
    assert not isinstance(version, AdapterUnknown)
    return version


def read(adapters: Adapters, adapter: Adapter) -> AdapterVersion | AdapterUnknown:
    """What is said of it once its files are read."""
    reading = adapters._loaded[adapter.number].digest
    if reading is not None:
        reading.result(WAIT_S)
    return adapters.version(adapter)


# -- files


def test_equal_folders_have_equal_digests_and_others_do_not(tmp_path: Path) -> None:
    one, same = write(tmp_path / "one", b"w"), write(tmp_path / "same", b"w")
    other, renamed = write(tmp_path / "other", b"v"), write(tmp_path / "renamed", b"w")
    (renamed / "adapter_model.safetensors").rename(renamed / "adapter_model.bin")
    digests = [digest(str(f), tuple(sorted(os.listdir(f)))) for f in (one, same, other, renamed)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_signature_sees_every_change_that_sizes_and_times_can_hide(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", b"one")
    weights = folder / "adapter_model.safetensors"
    before, times = signature(str(folder)), weights.stat()
    weights.write_bytes(b"two")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    until(lambda: signature(str(folder)) is not None)
    assert signature(str(folder)) != before


def test_a_link_to_other_files_is_a_change(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", b"w"), write(tmp_path / "two", b"v")
    folder = tmp_path / "linked"
    folder.mkdir()
    link = folder / "adapter_model.safetensors"
    link.symlink_to(one / link.name)
    until(lambda: signature(str(folder)) is not None)
    before = signature(str(folder))
    link.unlink()
    link.symlink_to(two / link.name)
    until(lambda: signature(str(folder)) is not None)
    assert signature(str(folder)) != before


def test_what_changed_just_now_has_no_signature(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", b"one")
    (folder / "adapter_model.safetensors").write_bytes(b"two")
    assert signature(str(folder)) is None


def test_what_is_no_adapters_folder_has_no_signature(tmp_path: Path) -> None:
    assert signature(str(tmp_path)) is None, "empty"
    assert signature(str(tmp_path / "missing")) is None
    assert signature("somebody/adapter-on-a-hub") is None
    for number in range(MAX_FILES + 1):
        (tmp_path / f"file-{number}").write_bytes(b"x")
    time.sleep(SETTLED_NS / 1e9 * 2)
    assert signature(str(tmp_path)) is None, "too many files"
    assert digest(str(tmp_path), ("gone",)) is None


# -- versions


def test_no_adapter_is_a_version_too(adapters: Adapters) -> None:
    assert adapters.version(None) == NO_ADAPTER == b""


def test_a_version_is_of_the_bytes_and_not_of_the_name(adapters: Adapters, adapter: Adapter, tmp_path: Path) -> None:
    same = Adapter(number=2, name="b", path=str(write(tmp_path / "b", b"one")))
    other = Adapter(number=3, name="c", path=str(write(tmp_path / "c", b"two")))
    versions = [known(adapters, item) for item in (adapter, same, other)]
    assert versions[0] == versions[1] != versions[2]
    assert len(versions[0]) == 32
    assert known(adapters, replace(same, number=4, format="bfloat16")) != versions[1]


def test_files_that_change_under_a_loaded_adapter_take_its_version_away(adapters: Adapters, adapter: Adapter) -> None:
    """The engine may have dropped it and loaded it again from there, or may do so next."""
    known(adapters, adapter)
    write(Path(adapter.path), b"two")
    assert adapters.version(adapter) is AdapterUnknown.UNKNOWN
    write(Path(adapter.path), b"one")
    assert adapters.version(adapter) is AdapterUnknown.UNKNOWN, "the same bytes again, but who read what between?"


def test_files_that_change_before_they_are_read_are_nobodys(adapters: Adapters, adapter: Adapter) -> None:
    adapters.loading(adapter)
    write(Path(adapter.path), b"two")
    assert read(adapters, adapter) is AdapterUnknown.UNKNOWN


def test_an_adapter_reloaded_in_place_has_a_version_again_once_the_cache_is_empty(
    adapters: Adapters, adapter: Adapter
) -> None:
    first = known(adapters, adapter)
    write(Path(adapter.path), b"two")
    adapters.loading(adapter, again=True)
    assert read(adapters, adapter) is AdapterUnknown.CHANGED, "the cache finds KV of the first by name and path"
    adapters.forgotten()
    assert known(adapters, adapter) != first


def test_a_reset_before_the_reload_does_not_count(adapters: Adapters, adapter: Adapter) -> None:
    known(adapters, adapter)
    write(Path(adapter.path), b"two")
    adapters.forgotten()
    adapters.loading(adapter, again=True)
    assert read(adapters, adapter) is AdapterUnknown.CHANGED


def test_files_written_just_before_they_are_loaded_are_waited_for(adapters: Adapters, adapter: Adapter) -> None:
    """As operators do: write the folder, then tell the engine."""
    first = known(adapters, adapter)
    (Path(adapter.path) / "adapter_model.safetensors").write_bytes(b"two")
    adapters.loading(adapter, again=True, now=True)
    adapters.forgotten()
    assert known(adapters, adapter) != first


def test_the_same_files_loaded_again_are_the_same_version(adapters: Adapters, adapter: Adapter) -> None:
    first = known(adapters, adapter)
    adapters.loading(adapter, again=True)
    assert known(adapters, adapter) == first
    again = replace(adapter, number=2)  # unloaded, and loaded under another number
    assert known(adapters, again) == first


def test_other_files_under_a_name_that_was_unloaded_are_a_change(adapters: Adapters, adapter: Adapter) -> None:
    known(adapters, adapter)
    write(Path(adapter.path), b"two")
    again = replace(adapter, number=2)
    adapters.loading(again)
    assert read(adapters, again) is AdapterUnknown.CHANGED


def test_a_number_that_two_adapters_share_says_nothing(adapters: Adapters, adapter: Adapter, tmp_path: Path) -> None:
    """The engine would take the one that it has for the other: which of them it computes with, nobody can say."""
    known(adapters, adapter)
    other = Adapter(number=1, name="b", path=str(write(tmp_path / "b", b"two")))
    assert adapters.version(other) is AdapterUnknown.UNKNOWN
    assert adapters.version(adapter) is AdapterUnknown.UNKNOWN


def test_adapters_without_end_are_not_remembered(adapters: Adapters, adapter: Adapter) -> None:
    known(adapters, adapter)
    for number in range(2, MAX_ADAPTERS + 10):
        adapters.loading(Adapter(number=number, name=f"n{number}", path="nowhere"))
    assert len(adapters._loaded) == MAX_ADAPTERS
    assert known(adapters, adapter)


def test_a_folder_that_goes_away_takes_the_version_with_it(adapters: Adapters, adapter: Adapter) -> None:
    known(adapters, adapter)
    shutil.rmtree(adapter.path)
    assert adapters.version(adapter) is AdapterUnknown.UNKNOWN
