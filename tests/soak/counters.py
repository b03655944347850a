"""Counters of processes that are killed now and then: scraped often, and summed over their restarts.

Reads Prometheus pages only. Invariant: what a counter lost between its last scrape and a kill is missing, never
counted twice.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import aiohttp

LINE: Final = re.compile(r"^(?P<name>[a-z][A-Za-z0-9_:]*)(?P<labels>\{[^}]*\})? (?P<value>\S+)$", re.MULTILINE)


async def scrape(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Values by name and labels; empty while nobody answers."""
    try:
        async with http.get(url) as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError):
        return {}
    return {match["name"] + (match["labels"] or ""): float(match["value"]) for match in LINE.finditer(text)}


class Counters:
    """`pages`: name of a process and the URL of its metrics."""

    def __init__(self, http: aiohttp.ClientSession, pages: Mapping[str, str]) -> None:
        self._http = http
        self._pages = pages
        self._last: dict[str, dict[str, float]] = defaultdict(dict)
        self._sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    async def update(self) -> None:
        pages = await asyncio.gather(*(scrape(self._http, url) for url in self._pages.values()))
        for name, now in zip(self._pages, pages, strict=True):
            if not now:
                continue
            last, sums = self._last[name], self._sums[name]
            for key, value in now.items():
                before = last.get(key, 0.0)
                sums[key] += value - before if value >= before else value
            self._last[name] = now

    def total(self, metric: str) -> float:
        """Of all processes and labels since the beginning."""
        return sum(
            value for sums in self._sums.values() for key, value in sums.items() if key.partition("{")[0] == metric
        )

    def by_label(self, metric: str) -> dict[str, float]:
        """The same by the first label's value."""
        found: dict[str, float] = defaultdict(float)
        for sums in self._sums.values():
            for key, value in sums.items():
                name, _, labels = key.partition("{")
                if name == metric and value:
                    found[labels.split('"')[1]] += value
        return dict(found)

    def now(self, metric: str) -> dict[str, float]:
        """A gauge's last value by process, summed over labels."""
        return {
            name: sum(value for key, value in page.items() if key.partition("{")[0] == metric)
            for name, page in self._last.items()
        }
