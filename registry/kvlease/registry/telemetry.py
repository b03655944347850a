"""Traces and the metrics endpoint: the set-up that registry, connector and router share.

Nothing here decides or counts. The global tracer provider of OpenTelemetry is left alone: inside vLLM it belongs to
vLLM; each part gets a tracer of its own, and spans still nest because the context is shared.
Invariant: without an endpoint nothing is exported, no thread is started, and spans cost next to nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self, TypeVar
from wsgiref.simple_server import WSGIServer

import grpc.aio
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NoOpTracerProvider, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, start_http_server

EXPORT_CLOSE_MS: Final = 3_000
"""How long `Tracing.close` may take to send what is left."""
_GIVE_UP_S: Final = 1.0

Request = TypeVar("Request")
Response = TypeVar("Response")

_TRACEPARENT: Final = "traceparent"
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class Tracing:
    """A part's tracer, and how to stop it."""

    __slots__ = ("_stop", "tracer")

    def __init__(self, tracer: Tracer, stop: Callable[[int], None]) -> None:
        self.tracer: Final = tracer
        self._stop = stop

    def close(self, timeout_ms: int = EXPORT_CLOSE_MS) -> None:
        """Send what is left, for `timeout_ms` at most; what is left then is lost.

        Blocks; call it from a thread if an event loop is running.
        """
        self._stop(timeout_ms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def configure_tracing(service: str, *, otlp_endpoint: str | None = None) -> Tracing:
    """A tracer for `service` that exports over OTLP/gRPC to `otlp_endpoint` (host:port or URL; https means TLS).

    Without one, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT is used; with neither, or with
    OTEL_SDK_DISABLED=true or OTEL_TRACES_EXPORTER=none, spans go nowhere. The other OTEL_* variables (service name,
    resource attributes, sampler, batch sizes, headers, certificates) mean what OpenTelemetry says they mean.
    """
    if not (otlp_endpoint or _endpoint_in_environment()) or _switched_off():
        return Tracing(NoOpTracerProvider().get_tracer("kvlease"), lambda timeout_ms: None)
    # Imported late: a part that does not trace need not pay for the SDK.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({SERVICE_NAME: service}).merge(OTELResourceDetector().detect())
    exporter = (
        OTLPSpanExporter(endpoint=otlp_endpoint, insecure=not otlp_endpoint.startswith("https://"))
        if otlp_endpoint
        else OTLPSpanExporter()
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def stop(timeout_ms: int) -> None:
        # The SDK's own flush and shutdown wait as long as the exporter retries, whatever bound they are given.
        closing = threading.Thread(target=provider.shutdown, name="kvlease last spans", daemon=True)
        closing.start()
        closing.join(timeout_ms / 1000)
        if closing.is_alive():
            exporter.shutdown(timeout_millis=0)
            closing.join(_GIVE_UP_S)

    return Tracing(provider.get_tracer("kvlease"), stop)


def _endpoint_in_environment() -> bool:
    return bool(os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"))


def _switched_off() -> bool:
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return disabled or os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"


def current_traceparent() -> str:
    """The W3C traceparent of the current span, "" if there is none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get(_TRACEPARENT, "")


def context_from_traceparent(traceparent: str) -> Context:
    """A context whose current span is the remote one; an empty context if `traceparent` is empty or malformed."""
    return _PROPAGATOR.extract({_TRACEPARENT: traceparent}, context=Context())


def link_from_traceparent(traceparent: str) -> Link | None:
    """A link to the remote span, None if `traceparent` is empty or malformed."""
    span_context = trace.get_current_span(context_from_traceparent(traceparent)).get_span_context()
    return Link(span_context) if span_context.is_valid else None


class TraceparentInterceptor(grpc.aio.UnaryUnaryClientInterceptor):
    """Sends the current span's traceparent as metadata of unary calls. Long streams have no one span to belong to."""

    async def intercept_unary_unary(
        self,
        continuation: Callable[
            [grpc.aio.ClientCallDetails, Request], Awaitable[grpc.aio.UnaryUnaryCall[Request, Response]]
        ],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Request,
    ) -> Response | grpc.aio.UnaryUnaryCall[Request, Response]:
        traceparent = current_traceparent()
        if traceparent:
            metadata = grpc.aio.Metadata(*(client_call_details.metadata or ()), (_TRACEPARENT, traceparent))
            client_call_details = grpc.aio.ClientCallDetails(
                method=client_call_details.method,
                timeout=client_call_details.timeout,
                metadata=metadata,
                credentials=client_call_details.credentials,
                wait_for_ready=client_call_details.wait_for_ready,
            )
        return await continuation(client_call_details, request)


class MetricsEndpoint:
    """An open Prometheus endpoint, answering on a thread of its own. `close` ends the thread."""

    __slots__ = ("_server", "_thread", "host", "port")

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.host: Final = str(server.server_address[0])
        self.port: Final = int(server.server_address[1])

    def close(self) -> None:
        """Idempotent. Blocks up to about half a second; call it from a thread if an event loop is running."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def serve_metrics(registry: CollectorRegistry, *, host: str, port: int) -> MetricsEndpoint:
    """Serve `registry` at http://host:port/metrics; port 0 picks one. Raises OSError if the address is taken."""
    server, thread = start_http_server(port, addr=host, registry=registry)
    return MetricsEndpoint(server, thread)
