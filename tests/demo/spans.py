"""A small OTLP gRPC receiver: keeps the spans that the fleet's processes export, so that the demo can tell their story.

Memory only, loopback only, traces only. What a span means is `story.py`'s business. Invariant: `spans` grows in the
order of arrival and is never cut short; a `SeenSpan` holds ids and numbers as they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self, TypeAlias

import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Attribute: TypeAlias = str | int | float | bool

CLOSE_GRACE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSpan:
    """One finished span. Times are nanoseconds of the exporter's wall clock."""

    name: str
    service: str
    trace_id: str
    span_id: str
    start_ns: int
    end_ns: int
    parent_id: str = ""
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    linked_traces: tuple[str, ...] = ()

    def text(self, key: str) -> str:
        """A text attribute; "" if absent."""
        value = self.attributes.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> int:
        """A whole number; 0 if absent."""
        value = self.attributes.get(key)
        return value if isinstance(value, int) else 0

    @property
    def ms(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e6


def _value(value: AnyValue) -> Attribute:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "bool_value":
            return value.bool_value
        case _:
            return ""


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Attribute]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _seen(span: Span, service: str) -> SeenSpan:
    return SeenSpan(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        linked_traces=tuple(link.trace_id.hex() for link in span.links),
    )


class SpanReceiver(TraceServiceServicer):
    """Listens on a free port of loopback while inside `async with`."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self._server: grpc.aio.Server | None = None
        self._arrived = asyncio.Condition()
        self._port = 0

    @property
    def endpoint(self) -> str:
        """http://host:port, for OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            await self._server.stop(CLOSE_GRACE_S)

    async def Export(  # noqa: N802 - the name is the protocol's
        self,
        request: ExportTraceServiceRequest,
        context: grpc.aio.ServicerContext[ExportTraceServiceRequest, ExportTraceServiceResponse],
    ) -> ExportTraceServiceResponse:
        async with self._arrived:
            for resource in request.resource_spans:
                service = str(_attributes(resource.resource.attributes).get("service.name", ""))
                self.spans += [_seen(span, service) for scope in resource.scope_spans for span in scope.spans]
            self._arrived.notify_all()
        return ExportTraceServiceResponse()

    async def wait(self, complete: Callable[[list[SeenSpan]], bool], timeout_s: float) -> bool:
        """Wait until the spans that arrived are complete in the caller's eyes; False if that takes too long."""
        try:
            async with asyncio.timeout(timeout_s), self._arrived:
                await self._arrived.wait_for(lambda: complete(self.spans))
        except TimeoutError:
            return False
        return True
