"""Command line flags made from typed settings, with a `--help` that says what each value looks like.

Parsing is pydantic-settings' and argparse's; only the words in the help are ours. No setting is named here.
Invariant: the same settings come out with and without this, for every command line.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource

_NO_DEFAULTS: Final = (" (default: ())", " (default: )", " (default: None)")
"""How it would be shown that there is no value unless one is given."""

Settings = TypeVar("Settings", bound=BaseSettings)


class SettingsError(ValueError):
    """A setting has a wrong value; one line per setting, each naming its flag and its variable."""


@dataclass(frozen=True, slots=True)
class Shown:
    """How a value is written in the help: `Annotated[int, Shown("MS")]`."""

    metavar: str


def parse(settings: type[Settings], argv: Sequence[str]) -> Settings:
    """Settings from flags and what else their class reads.

    Raises pydantic's ValidationError; SystemExit from argparse for an unknown flag or --help.
    """
    config = settings.model_config
    metavars = {
        f"--{name.replace('_', '-')}": shown.metavar
        for name, field in settings.model_fields.items()
        for shown in field.metadata
        if isinstance(shown, Shown)
    }
    prefix = config.get("env_prefix", "")
    parser = ArgumentParser(
        prog=config.get("cli_prog_name"),
        description=settings.__doc__,
        epilog=f"Each flag is also an environment variable: --some-flag is {prefix}SOME_FLAG. Flags win.",
    )

    def add(to: ArgumentParser, *names: str, **options: Any) -> Action:
        if names[0] in metavars:
            options["metavar"] = metavars[names[0]]
        for nothing in _NO_DEFAULTS:
            options["help"] = options["help"].removesuffix(nothing)
        return to.add_argument(*names, **options)

    source = CliSettingsSource[Any](settings, root_parser=parser, add_argument_method=add, cli_parse_args=list(argv))
    return settings(_cli_settings_source=source)


def load(settings: type[Settings], argv: Sequence[str] | None) -> Settings:
    """As `parse`, for a command: `argv` None means no flags. Raises SettingsError for what pydantic refuses."""
    try:
        return parse(settings, argv if argv is not None else [])
    except ValidationError as error:
        raise SettingsError("\n".join(_lines(error, settings.model_config.get("env_prefix", "")))) from error


def split_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [HOST]:PORT. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise ValueError(f"must be HOST:PORT, the port at most 65535, not {text!r}")
    return host, int(port)


def _lines(error: ValidationError, prefix: str) -> list[str]:
    lines = []
    for fault in error.errors(include_url=False, include_context=False):
        message = fault["msg"].removeprefix("Value error, ")
        name = str(fault["loc"][0]).replace("_", "-") if fault["loc"] else ""
        if not name:  # from the check of the whole, which names its setting itself
            name, _, message = message.partition(": ")
        lines.append(f"--{name} ({prefix}{name.upper().replace('-', '_')}): {message}")
    return lines
