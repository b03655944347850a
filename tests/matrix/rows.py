"""Rows of the matrix, read from `@pytest.mark.matrix(...)` in the sources of the tests.

Sources are parsed, not imported: the tests need engines, the page does not. A marker has a group, a condition, and what
becomes of it: what is lent, reused, freed, and computed. Invariant: every row names a test that exists.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "connector" / "MATRIX.md"
GROUPS: Final = (
    "A turn ends",
    "A prompt borrows",
    "A borrow fails",
    "Memory is wanted",
    "Time passes",
    "Something changes under a lease",
    "The engine",
)
FIELDS: Final = ("condition", "lent", "reused", "freed", "recomputed")
RINGS: Final = {"test_connector": "real engines", "test_inprocess": "vLLM's scheduler or worker, in-process"}


class MarkerInvalid(ValueError):
    """A marker that makes no row; the message says where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    group: str
    condition: str
    lent: str
    reused: str
    freed: str
    recomputed: str
    path: Path
    """Of the test's file, from the root of the repository."""
    test: str

    @property
    def ring(self) -> str:
        """On what the test runs."""
        return next((ring for name, ring in RINGS.items() if self.path.name.startswith(name)), "parts alone")


def rows(root: Path = ROOT) -> list[Row]:
    """All rows, by group, then in the order of files and tests. Raises MarkerInvalid."""
    found = [row for path in sorted((root / "tests").rglob("test_*.py")) for row in _of_file(path, root)]
    return sorted(found, key=lambda row: GROUPS.index(row.group))


def _of_file(path: Path, root: Path) -> Iterator[Row]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in reversed(node.decorator_list):
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.matrix":
                    yield _row(decorator, path.relative_to(root), node.name)


def _row(call: ast.Call, path: Path, test: str) -> Row:
    try:
        given = {str(word.arg): str(ast.literal_eval(word.value)) for word in call.keywords}
    except ValueError as error:
        raise MarkerInvalid(f"{path}::{test}: every field of a matrix marker is a text") from error
    if call.args or set(given) != {"group", *FIELDS} or given["group"] not in GROUPS:
        raise MarkerInvalid(f"{path}::{test}: a matrix marker has group (one of {GROUPS}) and {', '.join(FIELDS)}")
    return Row(path=path, test=test, **given)


def page(made: Sequence[Row]) -> str:
    """The page, as Markdown."""
    lines = [
        "# What becomes of a turn, by condition",
        "",
        "Generated from the tests by `make matrix`; do not edit. Each row is shown by the test it links to: what is",
        "lent when a turn ends, what a prompt reuses, which blocks are free afterwards, and what is computed again. No",
        "request fails for any of these conditions, and none waits without a bound.",
    ]
    for group in GROUPS:
        of_group = [row for row in made if row.group == group]
        if not of_group:
            continue
        lines += [
            "",
            f"## {group}",
            "",
            "| condition | lent | reused | freed | recomputed | shown on |",
            "|---|---|---|---|---|---|",
        ]
        for row in of_group:
            link = f'[{row.ring}](../{row.path.as_posix()} "{row.test}")'
            cells = (row.condition, row.lent, row.reused, row.freed, row.recomputed, link)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
