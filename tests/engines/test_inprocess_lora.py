"""LoRA adapters on vLLM's real scheduler and block hashes: KV is shared between equal bytes only (R4).

Two desks play a lender and a borrower on one host: what the one lends is what the other asks for, or it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the scheduler is vLLM's: install the engines (make engines-venv)")

from kvlease.connector.adapters import AdapterUnknown
from kvlease.connector.borrower import ComputeReason
from kvlease.registry.metrics import BORROWER_MISSES, LENDER_NOT_LENT
from kvlease.registry.values import common_strides

from tests.engines.engine import BLOCK_TOKENS
from tests.engines.inprocess import Desk, DeskSettings, Loads, desk, tokens
from tests.engines.inprocess_leases import LENDER_PARAMS, hit
from tests.engines.test_inprocess_weights import Engine
from tests.unit.test_adapters import until, write

pytestmark = pytest.mark.engines

PROMPT = tokens(10 * BLOCK_TOKENS)


class Slow:
    """Reads adapters when a test says so."""

    def __init__(self) -> None:
        self._asked: list[tuple[Future[Any], Any, Any]] = []

    def submit(self, work: Any, *args: Any) -> Future[Any]:
        self._asked.append((Future(), work, args))
        return self._asked[-1][0]

    def run(self) -> None:
        for result, work, args in self._asked:
            result.set_result(work(*args))


def lora(folder: Path, *, number: int = 1, inplace: bool = False) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=folder.name, lora_int_id=number, lora_path=str(folder), load_inplace=inplace)


def known(engine: Desk, adapter: Any) -> None:
    """The adapter's files have been read."""
    watch = engine.side._weights._adapters
    watch._adapters.version(watch._adapter(adapter))
    until(lambda: watch._adapters.version(watch._adapter(adapter)) is not AdapterUnknown.UNKNOWN)


def lend(lender: Desk, name: str, adapter: Any | None) -> bytes:
    """A finished turn; the digests of its lease, none if there is no new one."""
    before = set(lender.side._lending._holder._held)
    lender.add(name, PROMPT, kvlease={"conversation": "c"}, lora=adapter)
    lender.run()
    held = lender.side._lending._holder._held
    made = [lease for lease_id, lease in held.items() if lease_id not in before]
    return bytes(made[0].loan.chain.digests) if made else b""


def asked(borrower: Desk, name: str, adapter: Any | None) -> bytes:
    """The digests that a prompt asks with."""
    borrower.add(name, PROMPT, kvlease={"conversation": "c"}, lora=adapter)
    borrow = borrower.side._borrowing._core._borrows.get(name)
    return b"" if borrow is None else bytes(borrow.ask.chain.digests)


@pytest.fixture
def engines() -> Iterator[tuple[Desk, Desk]]:
    lora_engine = {"enable_lora": True, "max_loras": 4}
    with (
        desk(DeskSettings(role="kv_consumer", blocks=256, engine=lora_engine)) as lender,
        desk(DeskSettings(role="kv_producer", blocks=256, engine=lora_engine)) as borrower,
    ):
        yield lender, borrower


@pytest.mark.matrix(
    group="A prompt borrows",
    condition="a LoRA adapter",
    lent="-",
    reused="with the same adapter bytes",
    freed="-",
    recomputed="with another adapter, or none",
)
def test_a_lease_is_found_with_the_same_adapter_and_with_no_other(engines: tuple[Desk, Desk], tmp_path: Path) -> None:
    lender, borrower = engines
    a, b = lora(write(tmp_path / "a", b"one")), lora(write(tmp_path / "b", b"two"), number=2)
    for adapter in (a, b):
        known(lender, adapter)
        known(borrower, adapter)
    lent = lend(lender, "turn-1", a)
    assert common_strides(asked(borrower, "same", a), lent) == len(lent) // 16 == 5
    assert common_strides(asked(borrower, "other", b), lent) == 0
    assert common_strides(asked(borrower, "base", None), lent) == 0
    base = lend(lender, "turn-base", None)
    assert common_strides(asked(borrower, "again", a), base) == 0
    assert common_strides(asked(borrower, "plain", None), base) == 5


def test_other_bytes_at_the_same_path_of_another_host_are_another_adapter(
    engines: tuple[Desk, Desk], tmp_path: Path
) -> None:
    """Same name, same path, same tokens: only the bytes differ, and only they can tell."""
    lender, borrower = engines
    folder = write(tmp_path / "a", b"one")
    known(lender, lora(folder))
    lent = lend(lender, "turn-1", lora(folder))
    write(folder, b"two")
    known(borrower, lora(folder))
    assert len(lent) == len(asked(borrower, "next", lora(folder))) == 80
    assert common_strides(asked(borrower, "more", lora(folder)), lent) == 0


def test_an_adapter_reloaded_in_place_is_lent_again_after_a_reset_under_other_digests(
    engines: tuple[Desk, Desk], tmp_path: Path
) -> None:
    lender, _ = engines
    folder = write(tmp_path / "a", b"one")
    known(lender, lora(folder))
    first = lend(lender, "turn-1", lora(folder))
    write(folder, b"two")
    assert lend(lender, "changed-on-disk", lora(folder)) == b""
    assert lender.count(LENDER_NOT_LENT, reason="adapter_unknown") == 1
    again = lora(folder, inplace=True)
    Engine(lender).core.add_lora(again)
    known(lender, again)
    assert lend(lender, "with-kv-of-the-first", lora(folder)) == b""
    assert lender.count(LENDER_NOT_LENT, reason="adapter_changed") == 1
    assert lender.scheduler.reset_prefix_cache()
    second = lend(lender, "turn-2", lora(folder))
    assert len(second) == len(first)
    assert common_strides(first, second) == 0


@pytest.mark.matrix(
    group="Something changes under a lease",
    condition="an adapter whose bytes are not known",
    lent="nothing",
    reused="nothing",
    freed="all at its end",
    recomputed="all",
)
def test_an_adapter_that_is_not_read_yet_is_computed_with_a_reason(engines: tuple[Desk, Desk], tmp_path: Path) -> None:
    lender, borrower = engines
    nowhere = lora(tmp_path / "on-a-hub")
    assert lend(lender, "turn", nowhere) == b""
    assert asked(borrower, "next", nowhere) == b""
    assert lender.count(LENDER_NOT_LENT, reason="adapter_unknown") == 1
    assert borrower.count(BORROWER_MISSES, reason=ComputeReason.ADAPTER_UNKNOWN.value) == 1
    borrower.run()


@pytest.mark.matrix(
    group="Something changes under a lease",
    condition="adapter reloaded between arrival and admission",
    lent="-",
    reused="nothing",
    freed="-",
    recomputed="all",
)
def test_an_adapter_reloaded_between_arrival_and_admission_reads_nothing(
    engines: tuple[Desk, Desk], tmp_path: Path
) -> None:
    _, borrower = engines
    folder = write(tmp_path / "a", b"one")
    known(borrower, lora(folder))
    request = borrower.add("next", PROMPT, kvlease={}, lora=lora(folder))
    hit(borrower, request, strides=4, adapter=borrower.side._weights.adapter(request))
    write(folder, b"two")
    again = lora(folder, inplace=True)
    Engine(borrower).core.add_lora(again)
    known(borrower, again)
    assert borrower.scheduler.reset_prefix_cache()
    assert not borrower.schedule().kv_connector_metadata.reqs_to_recv
    assert borrower.count(BORROWER_MISSES, reason=ComputeReason.ADAPTER_CHANGED.value) == 1


def test_a_known_adapters_lease_is_read(engines: tuple[Desk, Desk], tmp_path: Path) -> None:
    """The same without the reload: that nothing was read there was its doing."""
    _, borrower = engines
    folder = write(tmp_path / "a", b"one")
    known(borrower, lora(folder))
    request = borrower.add("next", PROMPT, kvlease={}, lora=lora(folder))
    hit(borrower, request, strides=4, adapter=borrower.side._weights.adapter(request))
    output = borrower.schedule()
    assert list(output.kv_connector_metadata.reqs_to_recv) == ["next"]
    loads = Loads()
    loads.over("next")
    borrower.finish(output, loads)
    borrower.run()


def handed_over(lender: Desk, adapter: Any, theirs: str | None) -> dict[str, object]:
    """PROMPT's KV from a prefill engine that says it used "same", "other" or "unknown" bytes; None: a stock one."""
    received: dict[str, object] = {**LENDER_PARAMS, "do_remote_prefill": True, "remote_block_ids": [list(range(1, 11))]}
    version = lender.side._weights._adapters
    own = version._adapters.version(version._adapter(adapter)).hex()
    said = {"same": own, "other": "00" * 32, "unknown": "unknown"}.get(theirs or "")
    return received if said is None else {**received, "kvlease_adapter": said}


@pytest.mark.parametrize("theirs", ["same", "other", "unknown", None])
def test_a_turn_is_lent_only_if_its_prefill_used_the_same_bytes(
    engines: tuple[Desk, Desk], tmp_path: Path, theirs: str | None
) -> None:
    """Adapters come and go engine by engine; a prefill engine that does not say which it used is not believed."""
    lender, _ = engines
    adapter = lora(write(tmp_path / "a", b"one"))
    known(lender, adapter)
    received = handed_over(lender, adapter, theirs)
    lender.add("turn", PROMPT, max_tokens=5, params=received, kvlease={"conversation": "c"}, lora=adapter)
    lender.step(Loads(finished={"turn"}))
    lender.run()
    assert lender.leases == (1 if theirs == "same" else 0)


@pytest.mark.parametrize(("theirs", "found"), [("same", 9), ("other", 0), ("unknown", 0), (None, 0)])
def test_no_other_turn_finds_kv_of_other_bytes(
    engines: tuple[Desk, Desk], tmp_path: Path, theirs: str | None, found: int
) -> None:
    """An adapter gets other bytes engine by engine, decode first, or its files are not read everywhere yet."""
    lender, _ = engines
    adapter = lora(write(tmp_path / "a", b"one"))
    known(lender, adapter)
    received = handed_over(lender, adapter, theirs)
    lender.add("turn", PROMPT, max_tokens=5, params=received, lora=adapter)
    lender.step(Loads(finished={"turn"}))
    lender.run()
    lender.add("next", PROMPT, kvlease={"conversation": "c"}, lora=adapter)
    assert lender.step().scheduled_new_reqs[0].num_computed_tokens == found * BLOCK_TOKENS
    lender.run()
    assert lender.leases == 1


def test_kv_of_an_adapter_that_is_not_read_here_yet_locks_no_lending(
    engines: tuple[Desk, Desk], tmp_path: Path
) -> None:
    """An engine's first turns. What it computes itself later is lent, without any reset."""
    lender, _ = engines
    adapter = lora(write(tmp_path / "a", b"one"))
    watch = lender.side._weights._adapters._adapters
    reader, watch._reader = watch._reader, Slow()
    received: dict[str, object] = {**LENDER_PARAMS, "do_remote_prefill": True, "remote_block_ids": [list(range(1, 11))]}
    turn = lender.add("turn", PROMPT, max_tokens=5, params={**received, "kvlease_adapter": "00" * 32}, lora=adapter)
    lender.step(Loads(finished={"turn"}))
    lender.run()
    assert turn.num_output_tokens == 5
    watch._reader.run()
    watch._reader = reader
    lender.add("next", PROMPT, kvlease={"conversation": "c"}, lora=adapter)
    assert lender.step().scheduled_new_reqs[0].num_computed_tokens == 0
    lender.run()
    assert lender.leases == 1


def test_a_prefill_says_which_adapter_it_used(engines: tuple[Desk, Desk], tmp_path: Path) -> None:
    _, prefill = engines
    adapter = lora(write(tmp_path / "a", b"one"))
    handed: list[str] = []
    for name in ("early", "late"):
        request = prefill.add(name, tokens(70), params={"do_remote_decode": True}, lora=adapter)
        [finished] = [item for outputs in prefill.finish(prefill.schedule()).values() for item in outputs.outputs]
        handed.append(finished.kv_transfer_params["kvlease_adapter"])
        done = Loads()
        done.sent.add(name)
        prefill.step(done)
        known(prefill, adapter)
    assert handed[0] in ("unknown", handed[1])
    assert handed[1] == prefill.side._weights.adapter(request).hex()
