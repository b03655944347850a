"""What an engine says of itself reaches operators' terminals and programs as text, and as nothing else.

Values in, lines on stdout out; no registry here.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace

import pytest
from kvlease.cli.diagnosis import Finding, Grade
from kvlease.cli.render import Output
from kvlease.cli.visible import visible
from kvlease.registry.values import Engine, EngineId, EngineStatus, Fingerprint, Incarnation, Miss, MissReason

EVIL = "v1\nok      registry: all is well\r\x1b[2J\x9b31m\x7f\u202e"
ENGINE = Engine(engine_id=EngineId("d0"), incarnation=Incarnation(b"i" * 16), api_url="http://d0", version=EVIL)
STATUS = EngineStatus(
    engine=ENGINE,
    connected=True,
    suspect=False,
    silent_ms=1,
    leases=0,
    leased_blocks=0,
    free_blocks=1,
    total_blocks=1,
)


def obeyed(line: str) -> list[str]:
    """What a terminal would not show but do."""
    return [x for x in line if unicodedata.category(x) in ("Cc", "Cf")]


def test_a_table_has_a_row_an_engine_whatever_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(STATUS, engine=replace(ENGINE, api_url="http://a much longer one", version="2"))
    Output(as_json=False).engines([STATUS, other])
    head, evil, good = capsys.readouterr().out.splitlines()
    assert not obeyed(evil)
    assert "v1\\nok      registry: all is well\\r\\u001b[2J\\u009b31m\\u007f\\u202e" in evil
    assert head.index("VERSION") == evil.index("v1") == good.index("2", good.index("one"))


def test_a_finding_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=False).findings([Finding(grade=Grade.OK, about="version", subject="d0", text=EVIL)])
    (line,) = capsys.readouterr().out.splitlines()
    assert not obeyed(line)


def test_a_miss_has_a_line_for_each_field(capsys: pytest.CaptureFixture[str]) -> None:
    fingerprint = Fingerprint(fields=(("model\n\x1b[31m", "x\r\ny"),))
    miss = Miss(reason=MissReason.FINGERPRINT, lender_fingerprint=fingerprint)
    Output(as_json=False).answer(miss, stride_tokens=64)
    assert [obeyed(x) for x in capsys.readouterr().out.splitlines()] == [[], []]


def test_programs_read_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).engines([STATUS])
    (line,) = capsys.readouterr().out.splitlines()
    assert not obeyed(line)
    assert json.loads(line)["version"] == EVIL


@pytest.mark.parametrize("text", ["", "plain", "größer 模型 😀", "a b"])
def test_what_can_be_seen_stays(text: str) -> None:
    assert visible(text) == text
