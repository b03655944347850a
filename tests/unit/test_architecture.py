"""What the project decided against, as rules that can fail. `.importlinter` has the layers between the parts.

Cores are listed here by name pattern, so a new file of a core's name is one at once. A rule that gets in the way is
to be changed here, with the reason in the commit, not worked around. Every rule has a case below that breaks it, so
that none can pass by finding nothing to look at.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Final

import grimp
import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PARTS: Final = ("registry", "connector", "router")
PACKAGES: Final = ("kvlease.registry", "kvlease.connector", "kvlease.router", "kvlease.cli", "kvlease.etcd")

CORES: Final = (
    *(
        "kvlease.registry." + name
        for name in (
            "aliases",
            "engines",
            "errors",
            "identity",
            "lease_copy",
            "overload",
            "prefix_index",
            "staleness",
            "table*",
            "values",
        )
    ),
    *("kvlease.connector." + name for name in ("borrower*", "digests", "lender*", "loan", "prover")),
    *("kvlease.connector." + name for name in ("quarantine", "record", "request_params", "returns", "seal", "weights")),
    *("kvlease.router." + name for name in ("answer", "body", "conversations", "errors", "routes", "sse")),
    *("kvlease.etcd." + name for name in ("codec", "errors", "limits", "ops", "values", "watch_order")),
)
IMPURE: Final = frozenset(
    {
        "aiohttp",
        "asyncio",
        "concurrent",
        "grpc",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "prometheus_client",
        "opentelemetry",
        "random",
        "secrets",
        "selectors",
        "signal",
        "socket",
        "subprocess",
        "threading",
        "time",
        "uuid",
        "vllm",
    }
)
"""I/O, clocks, chance and threads: a core is told all of it by its shell."""
CORES_MAY_USE: Final = ("kvlease.v1.registry_pb2", "kvlease.etcdv3.etcd_pb2")
"""Beside other cores: the messages a record consists of, and etcd's."""

VENDORS: Final = frozenset({"vllm", "torch", "nixl", "nixl_cu12", "nixl_cu13"})
ADAPTERS: Final = ("kvlease.connector.plugin", "kvlease.connector.engine_facts", "kvlease.connector.vllm_*")
"""The only modules that may know the engine."""

VAGUE_NAMES: Final = frozenset({"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"})
MOST_LINES: Final = 400
DOCSTRING_LINES: Final = range(2, 11)


def sources() -> list[Path]:
    """Every Python file written by hand."""
    files = [path for part in (*PARTS, "tests") for path in sorted((ROOT / part).rglob("*.py"))]
    assert len(files) > 20, "the rules look at the wrong place"
    return files


@cache
def import_graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, "kvlease.v1", "kvlease.etcdv3", include_external_packages=True, cache_dir=None)


def matches(module: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def our_modules() -> list[str]:
    return sorted(module for module in import_graph().modules if module.startswith(PACKAGES))


def vague_names(path: Path) -> Iterator[str]:
    """A room holds one noun."""
    for part in path.with_suffix("").parts:
        if VAGUE_NAMES & set(part.split("_")):
            yield f"says nothing about what lives there: {part}"


def file_faults(text: str) -> Iterator[str]:
    """Size, opening words, silenced types."""
    lines = text.splitlines()
    if len(lines) > MOST_LINES:
        yield f"{len(lines)} lines, more than {MOST_LINES}: split it by noun"
    opening = (ast.get_docstring(ast.parse(text)) or "").strip().splitlines()
    if lines and len(opening) not in DOCSTRING_LINES:
        yield f"opens with {len(opening)} lines on what lives here, what must not, the invariant; wanted 2-10"
    for number, line in enumerate(lines, 1):
        if re.search(r"#\s*type:\s*ignore(?!\[)", line):
            yield f"line {number}: type: ignore without a code"
        if re.search(r"#\s*noqa(?!:)", line):
            yield f"line {number}: noqa without a code"


def core_faults(module: str, imported: Iterable[str]) -> Iterator[str]:
    """A core imports cores, values and pure libraries only."""
    for name in sorted(imported):
        if name.split(".")[0] in IMPURE:
            yield f"{module} is a core and imports {name}"
        elif name.startswith("kvlease.") and not matches(name, (*CORES, *CORES_MAY_USE)):
            yield f"{module} is a core and imports {name}, which is none"


def vendor_faults(module: str, imported: Iterable[str]) -> Iterator[str]:
    """vLLM and NIXL change with every release: one place knows them."""
    for name in sorted(imported):
        if name.split(".")[0] in VENDORS and not matches(module, ADAPTERS):
            yield f"{module} imports {name}; only {', '.join(ADAPTERS)} may"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files(path: Path) -> None:
    faults = [*vague_names(path.relative_to(ROOT)), *file_faults(path.read_text())]
    assert not faults, "\n".join(faults)


def test_cores_are_pure() -> None:
    graph = import_graph()
    cores = [module for module in our_modules() if matches(module, CORES)]
    missing = [pattern for pattern in CORES if not any(fnmatchcase(module, pattern) for module in cores)]
    assert not missing, f"patterns that match no module: {missing}"
    faults = [fault for core in cores for fault in core_faults(core, graph.find_modules_directly_imported_by(core))]
    assert not faults, "\n".join(faults)


def test_vendors_stay_in_their_adapters() -> None:
    graph = import_graph()
    faults = [
        fault
        for module in our_modules()
        for fault in vendor_faults(module, graph.find_modules_directly_imported_by(module))
    ]
    assert not faults, "\n".join(faults)


DOCSTRING: Final = '"""One.\n\nTwo.\n"""\n'


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (DOCSTRING + "x = 1\n" * MOST_LINES, "lines, more than"),
        ("x = 1\n", "opens with 0 lines"),
        ('"""One line."""\n', "opens with 1 lines"),
        (DOCSTRING + "x: int = f()  # type: " + "ignore\n", "type: ignore without a code"),
        (DOCSTRING + "import os  # no" + "qa\n", "noqa without a code"),
    ],
)
def test_file_rules_can_fail(text: str, fault: str) -> None:
    assert any(fault in found for found in file_faults(text))


def test_name_rule_can_fail() -> None:
    assert list(vague_names(Path("registry/kvlease/registry/lease_utils.py")))
    assert not list(vague_names(Path("registry/kvlease/registry/leases.py")))


@pytest.mark.parametrize("name", ["time", "os", "asyncio", "grpc.aio", "kvlease.registry.client"])
def test_core_rule_can_fail(name: str) -> None:
    assert list(core_faults("kvlease.registry.table", [name]))
    assert not list(core_faults("kvlease.registry.table", ["heapq", "kvlease.registry.values"]))


def test_vendor_rule_can_fail() -> None:
    assert list(vendor_faults("kvlease.connector.lender", ["vllm"]))
    assert not list(vendor_faults("kvlease.connector.plugin", ["vllm"]))
