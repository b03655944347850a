"""The command line: which commands there are, their flags, and who carries them out.

Only argparse here. `registry` and `router` have settings of their own, with their own --help; the rest are questions to
a registry (`operate.py`), which take KVLEASE_* variables in place of flags.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from kvlease.cli import exits, stdout

if TYPE_CHECKING:
    from kvlease.cli.diagnosis import DecodeEngine

DEFAULT_REGISTRY: Final = "127.0.0.1:7411"
CREDENTIALS: Final = {
    "tls-ca": "the CA of the registry's certificate; without it, no TLS",
    "tls-cert": "your certificate, with its kvlease:// name",
    "tls-key": "its private key",
    "token-file": "your bearer token, where callers are known by tokens",
}
STORE_FLAGS: Final = {
    "store-prefix": ("PREFIX", "of this fleet's keys, as given to the registries", "/kvlease/"),
    "store-ca": ("FILE", "the CA of etcd's certificates; without it there is no TLS", ""),
    "store-cert": ("FILE", "your certificate for etcd", ""),
    "store-key": ("FILE", "its private key", ""),
    "store-user": ("NAME", "user at etcd", ""),
    "store-password-file": ("FILE", "a file with the user's password", ""),
}
BENCH: Final = "kvlease-bench"
MOST_WAIT_MS: Final = 86_400_000
"""A day; nobody waits longer, and gRPC's deadlines end somewhere."""
_BEGINNING: Final = "the beginning of an id will do where no other lease shares it"
Number = TypeVar("Number", int, float)
SERVICES: Final = ("registry", "router")


def main(argv: list[str] | None = None) -> int:
    """Run one command; `argv` None means this process's arguments. Returns the exit status (`exits.py`)."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in SERVICES:
        return _serve(arguments[0], arguments[1:])
    try:
        stdout.flush()  # before anything is done of which nobody would hear
        status = _ask(_parser().parse_args(arguments))
        stdout.flush()
    except BrokenPipeError:  # who reads has had enough
        stdout.abandon()
        return exits.DONE
    except stdout.OutputLost as error:
        stdout.abandon()
        sys.stderr.write(f"kvlease: {error}\n")
        return exits.FAILED
    return status


def _ask(options: argparse.Namespace) -> int:
    if options.command == "health":
        from kvlease.cli import health

        return health.main(options)
    from kvlease.cli import operate

    return operate.main(options)


def _serve(service: str, arguments: list[str]) -> int:
    try:
        if service == "registry":
            from kvlease.cli.serve import main as serve
        else:
            from kvlease.router.__main__ import main as serve
    except ModuleNotFoundError as error:
        sys.stderr.write(f"kvlease {service}: {error.name} is missing; install kvlease[server]\n")
        return exits.FAILED
    return serve(arguments)


class _Version(argparse.Action):
    """Looks the version up only when asked: it reads files."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from kvlease.registry.release import installed_version

        stdout.say(f"kvlease {installed_version()}")
        stdout.flush()
        parser.exit(exits.DONE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlease",
        description="Lease-based KV block registry for disaggregated LLM serving on vLLM.",
        epilog=exits.TEXT,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in SERVICES:  # only for the list of commands: `main` has passed them on already
        commands.add_parser(name, help=f"run a {name}", add_help=False)

    leases = _question(commands, "leases", "list leases that can be resolved")
    _selection(leases)
    leases.add_argument(
        "--from-store",
        default="",
        metavar="etcd://HOST:PORT,...",
        help="read them from etcd, without asking a registry; those of silent lenders too",
    )
    for flag, (metavar, text, default) in STORE_FLAGS.items():
        leases.add_argument(f"--{flag}", default=default, metavar=metavar, help=f"with --from-store: {text}")
    _question(commands, "engines", "list engines that have a session or are missed")

    end = _question(commands, "end", "end leases, for good; what is ended or unknown already is no error")
    target = end.add_mutually_exclusive_group(required=True)
    target.add_argument("--lease", metavar="ID", help=f"one lease of the tenant; {_BEGINNING}")
    target.add_argument("--conversation", metavar="ID", help="a conversation of the tenant")
    target.add_argument("--engine", metavar="ID", help="all leases of an engine, whatever the tenant (a drain)")
    target.add_argument("--whole-tenant", action="store_true", help="all leases of the tenant")
    _tenant(end)

    drain = _question(commands, "drain", "end all leases of an engine that is about to stop, whatever the tenant")
    drain.add_argument("engine", metavar="ENGINE", help="its id; take it out of the routers first, or it lends again")

    health = _question(commands, "health", "say whether one registry serves, for probes; exit status 1 if not")
    health.add_argument("--live", action="store_true", help="status 0 whatever it answers, if only it answers")

    doctor = _question(commands, "doctor", "look for what is wrong with a deployment, and say what to do about it")
    doctor.add_argument(
        "--decode",
        action="append",
        default=[],
        type=_decode,
        metavar="[ENGINE_ID@]URL",
        help="a decode engine that should lend; repeat for several, as for the router",
    )

    resolve = _question(commands, "resolve", "find the lease that a borrower would get")
    resolve.add_argument("--lease", metavar="ID", help=f"this lease; {_BEGINNING}")
    resolve.add_argument("--conversation", metavar="ID", help="the longest lease of this conversation")
    resolve.add_argument("--digests", metavar="HEX", help="the longest common prefix with this digest chain")
    resolve.add_argument(
        "--stride-tokens", type=_within(1, 2**32 - 1), default=64, metavar="N", help="tokens a digest (default 64)"
    )
    _tenant(resolve)

    bench = _question(
        commands,
        "bench",
        "measure a running registry from here, with a lender and leases of its own, which it takes back",
    )
    bench.add_argument(
        "--tenant", type=_id, default=BENCH, metavar="ID", help="one that nobody uses (default %(default)s)"
    )
    bench.add_argument("--engine-id", type=_id, default=BENCH, metavar="ID", help="of its lender (default %(default)s)")
    bench.add_argument("--leases", type=_within(1, 10_000), default=100, metavar="N", help="(default %(default)s)")
    bench.add_argument(
        "--tokens", type=_within(64, 131_072), default=8_192, metavar="N", help="a lease (default %(default)s)"
    )
    bench.add_argument(
        "--seconds", type=_within(0.1, 60.0), default=2.0, metavar="S", help="each of seven parts (default %(default)s)"
    )
    bench.add_argument(
        "--callers", type=_within(1, 256), default=32, metavar="N", help="that ask at once (default %(default)s)"
    )

    watch = _question(commands, "watch", "show lease events as they happen, until interrupted")
    watch.add_argument(
        "--from-revision",
        type=_within(0, 2**64 - 1),
        default=0,
        metavar="N",
        help="events after it (default: from now)",
    )
    watch.add_argument(
        "--count",
        type=_within(0, 2**63 - 1),
        default=0,
        metavar="N",
        help="stop after so many events (default: never)",
    )
    _selection(watch)
    return parser


def _question(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", epilog=exits.TEXT)
    parser.add_argument(
        "--registry",
        default=os.environ.get("KVLEASE_REGISTRY") or DEFAULT_REGISTRY,
        type=_endpoints,
        metavar="HOST:PORT,...",
        help="one replica that works is asked (default: KVLEASE_REGISTRY, or %(default)s)",
    )
    for flag, text in CREDENTIALS.items():
        variable = "KVLEASE_" + flag.upper().replace("-", "_")
        default = os.environ.get(variable, "")
        parser.add_argument(f"--{flag}", default=default, metavar="FILE", help=f"{text} (default: {variable})")
    parser.add_argument(
        "--timeout-ms", type=_within(1, MOST_WAIT_MS), default=5_000, metavar="MS", help="(default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    return parser


def _selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lease", default="", metavar="ID", help="whose ids begin like this only")
    parser.add_argument("--tenant", metavar="ID", help="of this tenant only")
    parser.add_argument("--engine", metavar="ID", help="on this engine only")
    parser.add_argument("--conversation", metavar="ID", help="of this conversation only")


def _tenant(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", default="default", metavar="ID", help="(default %(default)s)")


def _decode(text: str) -> DecodeEngine:
    from kvlease.cli.doctor import parse_decode

    try:
        return parse_decode(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _endpoints(text: str) -> str:
    from kvlease.registry.client_endpoints import EndpointsInvalid, parse_endpoints

    try:
        parse_endpoints(text)
    except EndpointsInvalid as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _id(text: str) -> str:
    from kvlease.registry.values import MAX_ID_CHARS, is_id

    if not is_id(text):
        raise argparse.ArgumentTypeError(f"must be 1-{MAX_ID_CHARS} characters of [A-Za-z0-9._:@/+=-]")
    return text


def _within(low: Number, high: Number) -> Callable[[str], Number]:
    def number(text: str) -> Number:
        value = type(low)(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {low}-{high}")
        return value

    return number
