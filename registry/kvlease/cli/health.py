"""`kvlease health`: asks one registry whether it serves, over the standard gRPC health service; for probes.

For where a kubelet's own gRPC probe cannot ask, since it has no certificate to show. One call, and few modules, so that
it starts fast enough to be run every few seconds.
Invariant: the exit status is 0 only if the registry said SERVING or, with --live, if it said anything of itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Final

import grpc
from kvlease.cli import exits
from kvlease.registry.client_credentials import Credentials, CredentialsInvalid

SERVICE: Final = "kvlease.v1.Registry"
NOT_YET: Final = "NOT_YET"
"""It runs, and has not been in contact with its store since it started."""
SERVING: Final = "SERVING"
_OPTIONS: Final = (("grpc.enable_http_proxy", 0),)
"""As in `client_channel.py`, which would load much more."""


def main(options: argparse.Namespace) -> int:
    """Ask and say what was answered. Returns the exit status."""
    try:
        credentials = Credentials(tls_ca=options.tls_ca, tls_cert=options.tls_cert, tls_key=options.tls_key)
        status = ask(options.registry, credentials, timeout_ms=options.timeout_ms)
    except ImportError:
        return _fault("grpcio-health-checking is missing; install kvlease[server]", exits.FAILED)
    except CredentialsInvalid as error:
        return _fault(str(error), exits.USAGE)
    except grpc.RpcError as error:
        return _fault(f"no answer from {options.registry}: {error.code().name}, {error.details()}", exits.FAILED)
    text = json.dumps({"registry": options.registry, "health": status}) if options.json else status
    sys.stdout.write(f"{text}\n")
    return exits.DONE if options.live or status == SERVING else exits.FAILED


def ask(registry: str, credentials: Credentials, *, timeout_ms: int) -> str:
    """SERVING, NOT_SERVING or NOT_YET. Blocks. Raises grpc.RpcError, CredentialsInvalid, ImportError."""
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
    sys.stderr.write(f"kvlease health: {text}\n")
    return status
