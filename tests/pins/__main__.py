"""`python -m tests.pins` (`make bench-pins`): pinned block-seconds and hit rate of each way of keeping KV, as a table.

The same chats on engines of three sizes. Invariant: the figures depend on nothing but the chats and the code.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tests.pins.chats import BLOCK_TOKENS, load
from tests.pins.replay import replay, ways

SIZES = (600, 1_200, 4_800)
"""Blocks of 512 tokens: too few for the pins, just enough, plenty."""


def main() -> None:
    chats, console = load(), Console(width=120)
    hours = (chats[-1].arrival_ms - chats[0].arrival_ms) / 3_600_000
    console.print(
        f"{len(chats)} turns in {hours:.1f} h, {sum(chat.common_blocks > 0 for chat in chats)} of them go on from "
        "earlier ones"
    )
    for blocks in SIZES:
        table = Table(title=f"{blocks} blocks of {BLOCK_TOKENS} tokens", title_justify="left")
        table.add_column("leases")
        for name in ("pinned block-s", "of the pool", "turns reused", "tokens reused", "turned away"):
            table.add_column(name, justify="right")
        for name, engine in ways(blocks).items():
            outcome = replay(engine, chats)
            table.add_row(
                name,
                f"{outcome.pinned_block_seconds:,.0f}",
                f"{outcome.pinned_block_seconds / (blocks * hours * 3600):.0%}",
                f"{outcome.reused / max(1, outcome.continued):.0%}",
                f"{outcome.reused_tokens:,}",
                str(outcome.turned_away),
            )
        console.print(table)


if __name__ == "__main__":
    main()
