"""Programs that look at deploy/ without a cluster or a Docker engine: where they are, and what they said.

In CI a missing one fails the test; elsewhere the test is skipped and says what to install. Every run is bounded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
DEPLOY: Final = ROOT / "deploy"
LIMIT_S: Final = 60.0


def program(name: str, install: str) -> str:
    """Its path: beside this Python, or on PATH. Skips the test, or fails it in CI, where there is none."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        text = f"{name} is not installed: {install}"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    return found


def said(command: Sequence[str | Path], *, status: int = 0, env: Mapping[str, str] | None = None) -> str:
    """What a command printed on stdout. Fails the test, with all that it said, if its exit status is another one."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == status, f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def compose_command() -> list[str]:
    """Either Docker Compose: the plug-in of today, or the older program of that name."""
    docker = shutil.which("docker")
    if docker and not subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        return [docker, "compose"]
    return [program("docker-compose", "apt-get install docker-compose")]
