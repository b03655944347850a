"""`--help` of registry and router says what each value looks like; the flags themselves mean what they always meant.

Which settings there are, and what they refuse, is tested with each command.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

import pytest
from kvlease.registry import settings as registry_settings
from kvlease.registry.flags import Shown, parse
from kvlease.router import settings as router_settings
from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

TYPE_NAME = re.compile(r"--[a-z-]+ (str|int|float|bool|tuple|list|dict)\b")
"""Python's words, which say nothing to an operator."""


class Kettle(BaseSettings):
    """Boils water."""

    model_config = SettingsConfigDict(env_prefix="KETTLE_", cli_prog_name="kettle", cli_kebab_case=True)

    fill_ml: Annotated[int, Shown("ML")] = 500
    label: Annotated[str, Shown("TEXT")] = ""


@pytest.mark.parametrize("load", [registry_settings.load, router_settings.load])
def test_help_uses_no_type_names(load: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "--listen HOST:PORT" in shown
    assert not TYPE_NAME.findall(shown)
    assert not re.search(r"\(default: (None|\(\)|)\)", shown)
    assert re.search(r"KVLEASE_(REGISTRY|ROUTER)_SOME_FLAG", shown)


def test_flags_win_over_the_environment_and_it_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(Kettle, []).fill_ml == 500
    monkeypatch.setenv("KETTLE_FILL_ML", "250")
    monkeypatch.setenv("KETTLE_LABEL", "tea")
    kettle = parse(Kettle, ["--fill-ml", "125"])
    assert (kettle.fill_ml, kettle.label) == (125, "tea")
    assert parse(Kettle, []).fill_ml == 250


def test_wrong_values_and_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValidationError):
        parse(Kettle, ["--fill-ml", "much"])
    with pytest.raises(SystemExit) as end:
        parse(Kettle, ["--fill"])
    assert end.value.code == 2
    assert "kettle" in capsys.readouterr().err
