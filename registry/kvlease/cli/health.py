"""`kvlease health`: asks whether one registry serves, over the standard gRPC health service; for probes.

For where a kubelet's own gRPC probe cannot ask, since it has no certificate to show. One call a replica, and few
modules, so that it starts fast enough to be run every few seconds.
Invariant: the exit status is 0 only if a registry said SERVING or, with --live, if it said anything of itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Final

import grpc
from kvlease.cli import exits
from kvlease.cli.stdout import say
from kvlease.cli.visible import visible
from kvlease.registry.client_credentials import Credentials, CredentialsInvalid
from kvlease.registry.client_endpoints import parse_endpoints

SERVICE: Final = "kvlease.v1.Registry"
NOT_YET: Final = "NOT_YET"
"""It runs, and has not been in contact with its store since it started."""
SERVING: Final = "SERVING"
_OPTIONS: Final = (("grpc.enable_http_proxy", 0),)
"""As in `client_channel.py`, which would load much more."""


def main(options: argparse.Namespace) -> int:
    """Ask one replica after another until one serves, and say what was answered. Returns the exit status."""
    replicas = [str(x) for x in parse_endpoints(options.registry)]
    until_s = time.monotonic() + options.timeout_ms / 1_000
    answers: list[tuple[str, str]] = []
    faults: list[str] = []
    try:
        credentials = Credentials(tls_ca=options.tls_ca, tls_cert=options.tls_cert, tls_key=options.tls_key)
        for number, replica in enumerate(replicas):
            share_s = (until_s - time.monotonic()) / (len(replicas) - number)
            try:
                answers.append((replica, ask(replica, credentials, timeout_ms=max(1, int(share_s * 1_000)))))
            except grpc.RpcError as error:
                faults.append(f"no answer from {replica}: {error.code().name}, {error.details()}")
                continue
            if options.live or answers[-1][1] == SERVING:
                return _answer(options, *answers[-1], exits.DONE)
    except ImportError:
        return _fault("grpcio-health-checking is missing; install kvlease[server]", exits.FAILED)
    except CredentialsInvalid as error:
        return _fault(str(error), exits.USAGE)
    return _answer(options, *answers[0], exits.FAILED) if answers else _fault("; ".join(faults), exits.FAILED)


def _answer(options: argparse.Namespace, replica: str, status: str, exit_status: int) -> int:
    say(json.dumps({"registry": replica, "health": status}) if options.json else status)
    return exit_status


def ask(registry: str, credentials: Credentials, *, timeout_ms: int) -> str:
    """Of a replica: SERVING, NOT_SERVING or NOT_YET. Blocks. Raises grpc.RpcError, CredentialsInvalid, ImportError."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    proof = credentials.load(registry).channel
    with (
        grpc.insecure_channel(registry, options=_OPTIONS)
        if proof is None
        else grpc.secure_channel(registry, proof, options=_OPTIONS) as channel
    ):
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_ms / 1_000)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return NOT_YET
            raise
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


def _fault(text: str, status: int) -> int:
    sys.stderr.write(f"kvlease health: {visible(text)}\n")
    return status
