"""The edge around every rpc: our errors become gRPC statuses, calls are timed and counted, the caller's trace joined.
The caller is let in here, too, or not (`identity_gate.py`): refusals are counted like any other error.

A server interceptor, so that the servicer only decodes, calls and encodes. Nothing here knows what an rpc does.
Invariant: a KvleaseError never leaves without its reason; any other exception leaves as INTERNAL with no text of its
own, which could hold what a caller sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from kvlease.registry.errors import InternalError, InvalidRequest, KvleaseError, Reason
from kvlease.registry.errors_grpc import abort
from kvlease.registry.identity_gate import Behavior, Context, Gate, Message
from kvlease.registry.telemetry import context_from_traceparent
from opentelemetry import context as trace_context

_log = logging.getLogger(__name__)

Parse = Callable[[Any], Message]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class CallObserver(Protocol):
    """Hears of every call when it ends."""

    def finished(self, rpc: str, seconds: float, reason: Reason | None) -> None:
        """`rpc` is the method's name; `reason` is None unless an error ended it; a stream's `seconds` are its life."""
        ...


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of one service; other services (health, reflection) pass through."""

    def __init__(self, service: str, observer: CallObserver, *, join_traces: bool, gate: Gate | None = None) -> None:
        """`gate`: None lets everybody in."""
        self._prefix: Final = f"/{service}/"
        self._observer: Final = observer
        self._join_traces: Final = join_traces
        self._gate: Final = gate
        self._wrapped: dict[str, Any] = {}

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Handlers are stateless, so each is wrapped once."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None or not method.startswith(self._prefix):
                return handler
            wrapped = self._wrapped[method] = self._wrap(method.removeprefix(self._prefix), handler)
        return wrapped

    def _wrap(self, rpc: str, handler: Any) -> Any:
        """Requests are parsed where an error can still be answered: grpc would end the call without a reason."""
        parse, serialize = _strict(handler.request_deserializer), handler.response_serializer
        if handler.unary_unary:
            call = self._call(rpc, handler.unary_unary, parse)
            return grpc.unary_unary_rpc_method_handler(call, response_serializer=serialize)
        if handler.unary_stream:
            call = self._call(rpc, handler.unary_stream, parse)
            return grpc.unary_stream_rpc_method_handler(call, response_serializer=serialize)
        call = self._call(rpc, handler.stream_stream, _as_is)
        return grpc.stream_stream_rpc_method_handler(call, request_deserializer=parse, response_serializer=serialize)

    def _call(self, rpc: str, behavior: Behavior, parse: Parse) -> Behavior:
        if self._gate is not None:
            behavior = self._gate.guarded(rpc, behavior)

        async def call(request: Message, context: Context) -> Message:
            started = time.perf_counter()
            token = self._join(context)
            known: KvleaseError | None = None
            try:
                return await behavior(parse(request), context)
            except KvleaseError as error:
                known = error
            except Exception as error:  # noqa: BLE001 - the outermost frame of a call
                if context.done():  # the caller is gone, and with it whoever would read the status
                    return None
                _log.error("%s failed", rpc, exc_info=error)
                known = InternalError("internal error")
            finally:
                self._observer.finished(rpc, time.perf_counter() - started, known.reason if known is not None else None)
                if token is not None:
                    trace_context.detach(token)
            return await abort(context, known)

        return call

    def _join(self, context: Context) -> Any:
        if not self._join_traces:
            return None
        for key, value in context.invocation_metadata() or ():
            if key == "traceparent" and isinstance(value, str):
                return trace_context.attach(context_from_traceparent(value))
        return None


def _strict(parse: Parse) -> Parse:
    def parse_or_refuse(raw: bytes) -> Message:
        try:
            return parse(raw)
        except DecodeError as error:
            raise InvalidRequest("the bytes are no message of this rpc") from error

    return parse_or_refuse


def _as_is(request: Message) -> Message:
    return request
