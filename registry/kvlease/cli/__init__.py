"""The `kvlease` command: registry and router to run, and what an operator asks a registry.

Starts fast: what a command needs is imported when it runs. No engine, no vLLM here.
"""

from __future__ import annotations

from kvlease.cli.commands import main

__all__ = ["main"]
