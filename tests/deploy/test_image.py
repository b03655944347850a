"""The image of deploy/image has what the tests run with, and whatever is needed to start from it.

There is no Docker engine here: what the Dockerfile says is read, not built.
"""

from __future__ import annotations

import re
from importlib.metadata import distribution
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from tests.deploy.tools import DEPLOY, ROOT

IMAGE: Final = (DEPLOY / "image" / "Dockerfile").read_text()
PINS: Final = ROOT / "tests" / "engines" / "requirements-cpu.txt"


def test_every_package_in_the_image_is_of_the_version_that_was_tested() -> None:
    assert "--constraint constraints.txt '.[server]'" in IMAGE
    assert f"COPY {PINS.relative_to(ROOT)} constraints.txt" in IMAGE
    pinned: dict[NormalizedName, str] = {}
    for line in PINS.read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            pinned[canonicalize_name(requirement.name)] = str(requirement.specifier)
    needed = _needed("kvlease", "server")
    assert len(needed) > 20
    assert {name: f"=={distribution(name).version}" for name in needed} == {name: pinned[name] for name in needed}


def test_nobody_is_root_and_the_command_is_ours() -> None:
    assert re.search(r"^FROM \$\{PYTHON_IMAGE\}", IMAGE, re.MULTILINE)
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+$", IMAGE, re.MULTILINE)
    *_, user = re.findall(r"^USER (\S+)$", IMAGE, re.MULTILINE)
    assert user == "10001:10001"
    assert 'ENTRYPOINT ["kvlease"]' in IMAGE


def _needed(name: str, *extras: str) -> set[NormalizedName]:
    """Canonical names of all that is installed with this distribution, itself left out."""
    found: set[NormalizedName] = set()
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset(extras))]
    while waiting:
        current, asked = waiting.pop()
        for text in distribution(current).requires or ():
            requirement = Requirement(text)
            if requirement.marker and not any(
                requirement.marker.evaluate({"extra": extra}) for extra in (asked or frozenset({""}))
            ):
                continue
            canonical = canonicalize_name(requirement.name)
            if canonical not in found:
                found.add(canonical)
                waiting.append((canonical, frozenset(requirement.extras)))
    return found
