"""Tracing is off unless asked for, traceparents survive, and spans arrive at a real OTLP receiver; metric names.

The receiver is a gRPC server on a loopback port.
"""

from __future__ import annotations

import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from kvlease.registry import metrics
from kvlease.registry.metrics import Metric
from kvlease.registry.telemetry import (
    configure_tracing,
    context_from_traceparent,
    current_traceparent,
    link_from_traceparent,
    serve_metrics,
)
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from prometheus_client import CollectorRegistry

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MALFORMED = ("", "nonsense", TRACEPARENT[:-1], "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff" + TRACEPARENT[2:])


class Receiver(TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []

    def Export(  # noqa: N802
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self.requests.append(request)
        return ExportTraceServiceResponse()


@contextmanager
def receiving() -> Iterator[tuple[str, Receiver]]:
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", receiver
    finally:
        server.stop(None).wait(5)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)


def test_nothing_is_recorded_unless_asked_for() -> None:
    with configure_tracing("kvlease-test") as tracing, tracing.tracer.start_as_current_span("turn") as span:
        assert not span.is_recording()
        assert current_traceparent() == ""


@pytest.mark.parametrize("through", ["argument", "url", "environment"])
def test_spans_arrive_with_parent_link_and_service(through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as (endpoint, receiver):
        given = {"argument": endpoint, "url": f"http://{endpoint}", "environment": None}[through]
        if through == "environment":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{endpoint}")
        link = link_from_traceparent(TRACEPARENT)
        assert link is not None
        with configure_tracing("kvlease-test", otlp_endpoint=given) as tracing:
            parent = context_from_traceparent(TRACEPARENT)
            with tracing.tracer.start_as_current_span("resolve", context=parent, links=[link]):
                assert current_traceparent().startswith(TRACEPARENT[:36])
        resource_spans = receiver.requests[0].resource_spans[0]
        span = resource_spans.scope_spans[0].spans[0]
        assert span.name == "resolve"
        assert span.trace_id.hex() == TRACEPARENT[3:35]
        assert span.parent_span_id.hex() == span.links[0].span_id.hex() == TRACEPARENT[36:52]
        services = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
        assert services["service.name"] == "kvlease-test"


def test_the_environment_can_name_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as (endpoint, receiver):
        monkeypatch.setenv("OTEL_SERVICE_NAME", "by-environment")
        with configure_tracing("kvlease-test", otlp_endpoint=endpoint) as tracing:
            tracing.tracer.start_span("turn").end()
        attributes = receiver.requests[0].resource_spans[0].resource.attributes
        assert "by-environment" in {item.value.string_value for item in attributes}


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_the_environment_can_switch_tracing_off(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with configure_tracing("kvlease-test", otlp_endpoint="127.0.0.1:1") as tracing:
        assert not tracing.tracer.start_span("turn").is_recording()


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_traceparent_is_no_parent_and_no_link(text: str) -> None:
    assert link_from_traceparent(text) is None
    assert not trace.get_current_span(context_from_traceparent(text)).get_span_context().is_valid


def test_closing_does_not_wait_for_a_collector_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        tracing = configure_tracing("kvlease-test", otlp_endpoint=f"127.0.0.1:{mute.getsockname()[1]}")
        tracing.tracer.start_span("turn").end()
        closing = threading.Thread(target=tracing.close, args=(50,), daemon=True)
        closing.start()
        closing.join(6)  # the exporter alone would take its ten seconds
        assert not closing.is_alive()


def test_the_global_provider_is_left_alone() -> None:
    before = trace.get_tracer_provider()
    with receiving() as (endpoint, _), configure_tracing("kvlease-test", otlp_endpoint=endpoint):
        assert trace.get_tracer_provider() is before


def all_metrics() -> list[Metric]:
    return [value for value in vars(metrics).values() if isinstance(value, Metric)]


def test_metric_names_follow_the_rules() -> None:
    names = [metric.name for metric in all_metrics()]
    assert len(names) > 20
    assert len(set(names)) == len(names)
    part = re.compile(r"kvlease_(registry|lender|borrower|connector|router)_[a-z_]+\Z")
    assert [name for name in names if not part.match(name)] == []
    assert [name for name in names if name.endswith(("_ms", "_milliseconds", "_kb", "_mb"))] == [], "base units only"
    forbidden = {"lease", "lease_id", "conversation", "request", "digest"}
    assert [metric.name for metric in all_metrics() if forbidden & set(metric.labels)] == []


def test_every_metric_can_be_built_and_is_served_under_its_name() -> None:
    registry = CollectorRegistry()
    for metric in all_metrics():
        if metric.name.endswith("_total"):
            built = metric.counter(registry)
            (built.labels(*metric.labels) if metric.labels else built).inc()
        else:
            gauge = metric.gauge(registry)
            (gauge.labels(*metric.labels) if metric.labels else gauge).set(1)
    with serve_metrics(registry, host="127.0.0.1", port=0) as endpoint:
        with urllib.request.urlopen(f"http://{endpoint.host}:{endpoint.port}/metrics", timeout=5) as response:
            text = response.read().decode()
        port = endpoint.port
    for metric in all_metrics():
        assert re.search(rf"^{metric.name}(\{{.*\}})? 1\.0$", text, re.M), metric.name
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def test_a_taken_port_is_an_error() -> None:
    first = serve_metrics(CollectorRegistry(), host="127.0.0.1", port=0)
    with first, pytest.raises(OSError, match="in use"):
        serve_metrics(CollectorRegistry(), host="127.0.0.1", port=first.port)
