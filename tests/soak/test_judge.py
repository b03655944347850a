"""The soak's judge, its reading of answers and of counters: each fault is seen, and only what is excused is excused.

No engines: answers are made by hand, over a real server where the wire matters.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from tests.soak.answers import Choice, Cut, Refused, Said, ask
from tests.soak.chats import CHAT, Kind, Step, record_chat
from tests.soak.counters import Counters
from tests.soak.judge import GRACE_S, HANG_S, Fault, Judge, Outage, answer_difference
from tests.soak.report import report

RIGHT = Choice(text=" a b", tokens=(" a", " b"), logprobs=(-1.0, -2.0), finish_reason="length")
STEP = Step(kind=Kind.PLAIN, path=CHAT, body={}, prompt_tokens=9, choices=(RIGHT,))


def said(*choices: Choice, prompt_tokens: int = 9) -> Said:
    return Said(choices=choices, prompt_tokens=prompt_tokens, gap=1.0)


@pytest.mark.parametrize(
    "answer",
    [
        said(replace(RIGHT, logprobs=(-1.0, -2.01))),
        said(replace(RIGHT, tokens=(" a", " c"))),
        said(replace(RIGHT, text=" a c")),
        said(replace(RIGHT, finish_reason="stop")),
        said(replace(RIGHT, logprobs=(-1.0,))),
        said(replace(RIGHT, logprobs=())),
        said(RIGHT, RIGHT),
        said(),
        said(RIGHT, prompt_tokens=8),
    ],
)
def test_a_wrong_answer_is_red(answer: Said) -> None:
    judge = Judge()
    judge.answered(STEP, answer, 1.0, "a turn")
    assert [fault for fault, _ in judge.faults] == [Fault.WRONG]


def test_a_right_answer_may_differ_by_rounding() -> None:
    judge = Judge()
    judge.answered(STEP, said(replace(RIGHT, logprobs=(-1.000002, -2.0))), 1.0, "a turn")
    assert not judge.faults
    assert 0 < judge.largest_difference < 1e-5


@pytest.mark.parametrize(
    ("began_s", "ended_s", "excused"), [(5, 9, False), (5, 11, True), (12, 13, True), (20.4, 21, True), (21, 22, False)]
)
def test_only_requests_beside_a_kill_are_excused(began_s: float, ended_s: float, excused: bool) -> None:
    assert GRACE_S == 0.5
    judge = Judge(outages=[Outage(name="decode", excuses=True, began_s=10, ended_s=20)])
    judge.failed(began_s, ended_s, "a turn")
    assert bool(judge.faults) is not excused


def test_a_killed_prefill_engine_or_registry_excuses_nothing() -> None:
    judge = Judge(outages=[Outage(name="prefill", excuses=False, began_s=10, ended_s=20)])
    judge.failed(12, 13, "a turn")
    assert [fault for fault, _ in judge.faults] == [Fault.ERROR]


def test_a_hang_is_a_fault_beside_a_kill_as_well() -> None:
    judge = Judge(outages=[Outage(name="decode", excuses=True, began_s=10)])
    judge.failed(11, 11 + HANG_S, "a turn")
    judge.answered(STEP, said(RIGHT), HANG_S, "another")
    assert [fault for fault, _ in judge.faults] == [Fault.HANG, Fault.HANG]


@pytest.mark.parametrize(("status", "fault"), [(400, None), (404, None), (None, Fault.ACCEPTED), (200, Fault.ERROR)])
def test_a_bad_request_is_refused(status: int | None, fault: Fault | None) -> None:
    judge = Judge()
    judge.bad_request(status, "nonsense")
    assert [found for found, _ in judge.faults] == ([fault] if fault else [])


@pytest.mark.parametrize(("reused", "fine"), [([0, 64, 0], True), ([0, 0, 64], False), ([0], False), ([], False)])
def test_the_second_turn_after_a_restart_must_reuse(reused: list[float], fine: bool) -> None:
    judge = Judge()
    judge.probed(reused, "a kill")
    assert (not judge.faults) is fine


def test_a_run_without_turns_reuse_or_control_fails() -> None:
    empty = Judge()
    empty.end(0)
    assert [fault for fault, _ in empty.faults] == [Fault.BLIND, Fault.BLIND, Fault.BLIND, Fault.NO_REUSE]
    good = Judge(saw_blocks_held=True)
    good.control(STEP, said(replace(RIGHT, logprobs=(-1.0, -2.5))))
    good.answered(STEP, said(RIGHT), 1.0, "a turn")
    good.end(64)
    assert not good.faults
    blind = Judge()
    blind.control(STEP, said(RIGHT))
    assert [fault for fault, _ in blind.faults] == [Fault.BLIND]


CHUNK = {"index": 0, "delta": {"content": " a"}, "logprobs": {"content": [{"token": " a", "logprob": -1.0}]}}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[aiohttp.ClientSession, str, dict[str, bytes]]]:
    """Answers a path with the bytes that stand for it."""
    pages: dict[str, bytes] = {}

    async def answer(request: web.Request) -> web.Response:
        body = pages[request.path]
        kind = "text/event-stream" if body.startswith(b"data") else "application/json"
        status = 503 if request.path == "/refused" else 200
        return web.Response(status=status, body=body, content_type=kind)

    app = web.Application()
    app.router.add_route("*", "/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession() as http:
        yield http, f"http://127.0.0.1:{port}", pages
    await runner.cleanup()


def events(*bodies: object, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(body)}\n\n" for body in bodies] + ["data: [DONE]\n\n"] * done
    return "".join(lines).encode()


async def test_streams_of_several_choices_are_gathered(
    server: tuple[aiohttp.ClientSession, str, dict[str, bytes]],
) -> None:
    http, url, pages = server
    second = {**CHUNK, "index": 1, "finish_reason": "stop"}
    last = {"index": 0, "delta": {}, "finish_reason": "length"}
    pages["/s"] = events(
        {"choices": [second, CHUNK]}, {"choices": [last]}, {"choices": [], "usage": {"prompt_tokens": 9}}
    )
    found = await ask(http, f"{url}/s", {})
    one = Choice(text=" a", tokens=(" a",), logprobs=(-1.0,), finish_reason="length")
    assert found == Said(choices=(one, replace(one, finish_reason="stop")), prompt_tokens=9, gap=math.inf)
    step = Step(kind=Kind.SEVERAL, path=CHAT, body={}, prompt_tokens=9, choices=found.choices)
    assert answer_difference(Step.from_json(json.loads(json.dumps(step.as_json()))), found) == 0


async def test_what_is_not_whole_is_an_error(server: tuple[aiohttp.ClientSession, str, dict[str, bytes]]) -> None:
    http, url, pages = server
    pages["/cut"] = events({"choices": [CHUNK]}, done=False)
    pages["/unfinished"] = events({"choices": [CHUNK]})
    pages["/error"] = events({"choices": [CHUNK]}, {"error": {"message": "gone"}})
    pages["/refused"] = b"{}"
    for path, error in (("/cut", Cut), ("/unfinished", Cut), ("/error", Refused), ("/refused", Refused)):
        with pytest.raises(error):
            await ask(http, url + path, {})


async def test_counters_are_summed_over_restarts(server: tuple[aiohttp.ClientSession, str, dict[str, bytes]]) -> None:
    http, url, pages = server
    counters = Counters(http, {"p": f"{url}/metrics"})
    name = "kvlease_borrower_reused_tokens_total"
    for value in (100, 164, 32):  # restarted before the third
        pages["/metrics"] = f'{name} {value}\nkvlease_connector_faults_total{{hook="h"}} 1.0\n'.encode()
        await counters.update()
    assert counters.total(name) == 196
    judge = Judge()
    assert report("a phase", 1.0, judge, counters, {})["reused_tokens"] == 196
    assert Fault.CONNECTOR in [fault for fault, _ in judge.faults]


async def test_chats_depend_on_their_seed_and_close_calls_are_asked_anew() -> None:
    asked: list[str] = []

    async def reference(_path: str, body: dict[str, object]) -> Said:
        asked.append(json.dumps(body))
        count = len(body["prompt"]) if isinstance(body.get("prompt"), list) else body.get("n", 1)  # type: ignore[arg-type]
        return Said(choices=(RIGHT,) * int(count), prompt_tokens=9, gap=1e-6 if len(asked) == 1 else 1.0)  # type: ignore[call-overload]

    chats = [await record_chat(f"chat {number}", reference) for number in range(40)]
    first = asked[0]
    assert first not in [json.dumps(step.body) for step in chats[0]], "an answer too close to call was kept"
    assert {step.kind for chat in chats for step in chat} == set(Kind)
    asked.append("so that the next answer is clear")
    again = await record_chat("chat 5", reference)
    assert [step.body for step in again] == [step.body for step in chats[5]]
