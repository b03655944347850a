"""The reference: one engine with vLLM's own connector, no prefix cache and no registry, that computes every prompt.

It runs alone before the soak and is gone when the soak begins; its answers are kept under `.cache/`, by seed and by
the code that makes the chats. Invariant: nothing of the fleet under test takes part in what is recorded here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.engines import model
from tests.engines.engine import EngineSettings, Role
from tests.engines.fleet import Fleet, FleetSettings
from tests.engines.openai_client import http_session
from tests.soak import answers, chats
from tests.soak.chats import Step, record_chat, record_probe

ASK_TIMEOUT_S: Final = 120.0
AT_ONCE: Final = 3
PROBES: Final = 4
VERIFIED: Final = 8
"""Recorded turns that are asked a second time: the reference must agree with itself."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    chats: list[list[Step]]
    probes: list[list[Step]]


def _path(seed: int, count: int) -> Path:
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in (model, answers, chats))
    return model.CACHE / "soak" / f"reference-{hashlib.sha256(code).hexdigest()[:12]}-{seed}-{count}.json"


async def reference(seed: int, count: int, tell: Tell) -> Reference:
    """`count` chats of this seed, recorded now unless they were before."""
    path = _path(seed, count)
    if not path.exists():
        made = await _make(seed, count, tell)
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {name: [[step.as_json() for step in chat] for chat in value] for name, value in made.items()}
        new = path.with_suffix(f".{secrets.token_hex(4)}")
        new.write_text(json.dumps(fields))
        new.rename(path)
    stored = json.loads(path.read_text())
    read = {name: [[Step.from_json(step) for step in chat] for chat in value] for name, value in stored.items()}
    return Reference(chats=read["chats"], probes=read["probes"])


async def _make(seed: int, count: int, tell: Tell) -> dict[str, list[list[Step]]]:
    engine = EngineSettings(
        engine_id=f"reference-{secrets.token_hex(3)}", role=Role.DECODE, prefix_caching=False, max_model_len=8_192
    )
    tell(f"recording {count} chats of seed {seed} with the reference engine")
    async with (
        Fleet(FleetSettings(engines=[engine], registry=False, router=False)) as fleet,
        http_session(ASK_TIMEOUT_S) as http,
    ):
        url = fleet.engine_url(engine.engine_id)
        limit = asyncio.Semaphore(AT_ONCE)

        async def ask(path: str, body: answers.Body) -> answers.Said:
            return await answers.ask(http, url + path, body)

        done = 0

        async def chat(number: int) -> list[Step]:
            nonlocal done
            async with limit:
                steps = await record_chat(f"chat {seed} {number}", ask)
            done += 1
            if done % 20 == 0:
                tell(f"  {done} chats recorded")
            return steps

        recorded = await asyncio.gather(*(chat(number) for number in range(count)))
        probes = [await record_probe(f"probe {seed} {number}", ask) for number in range(PROBES)]
        for steps in recorded[:VERIFIED]:
            again = await ask(steps[-1].path, steps[-1].body)
            if [one.tokens for one in again.choices] != [one.tokens for one in steps[-1].choices]:
                raise RuntimeError("the reference engine does not agree with itself")
    return {"chats": list(recorded), "probes": probes}
