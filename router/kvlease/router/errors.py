"""What the router says when a turn cannot be served: typed errors and their one OpenAI shape.

Every failure that reaches a client is one of these. The table below is total: each error class has its HTTP status,
OpenAI `type` and stable `code`. An engine's own 4xx is not here: it passes through unchanged (turn.py).

No I/O and no framework types: `app.py` turns these into responses.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import ClassVar, Final

SSE_DONE: Final = b"data: [DONE]\n\n"


class RouterError(Exception):
    """Base of all errors a client can see. `code` is stable and safe to match on; `message` is for people."""

    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def as_json(self) -> bytes:
        """The OpenAI error object, UTF-8."""
        return error_json(self.message, type_=self.type, code=self.code, param=self.param)

    def as_event(self) -> bytes:
        """The same as a server-sent event, for a stream that has begun."""
        return b"data: " + self.as_json() + b"\n\n"


class InvalidRequest(RouterError):
    """The body, a header or an id is not what the API allows; `param` names it."""

    status = HTTPStatus.BAD_REQUEST
    type = "invalid_request_error"
    code = "invalid_request"


class RequestTimeout(RouterError):
    """The client did not send its body within `client_timeout_ms`."""

    status = HTTPStatus.REQUEST_TIMEOUT
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLarge(RouterError):
    """The body exceeds `max_body_bytes`."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    type = "invalid_request_error"
    code = "body_too_large"


class NotServed(RouterError):
    """No such path, or nothing by that name."""

    status = HTTPStatus.NOT_FOUND
    type = "invalid_request_error"
    code = "not_found"


class MethodNotServed(RouterError):
    status = HTTPStatus.METHOD_NOT_ALLOWED
    type = "invalid_request_error"
    code = "method_not_allowed"


class ExpectationFailed(RouterError):
    """An Expect header that asks for something else than 100-continue."""

    status = HTTPStatus.EXPECTATION_FAILED
    type = "invalid_request_error"
    code = "expectation_failed"


class Overloaded(RouterError):
    """`max_turns` turns are in flight already. Retry after a second."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "server_error"
    code = "overloaded"


class ShuttingDown(RouterError):
    """The router stops, and the turn did not end in time. Another router serves it."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "server_error"
    code = "shutting_down"


class EngineUnreachable(RouterError):
    """No decode engine could be connected to. Nothing was generated; a retry is safe."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "server_error"
    code = "engine_unreachable"


class EngineBroken(RouterError):
    """A decode engine failed while it was answering."""

    status = HTTPStatus.BAD_GATEWAY
    type = "server_error"
    code = "engine_failed"


class EngineTimeout(RouterError):
    """A decode engine was silent for longer than the named limit."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    type = "server_error"
    code = "engine_timeout"


class RegistryDown(RouterError):
    """The registry did not answer a call that only it can answer (ending a conversation). Turns never see this."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "server_error"
    code = "registry_unavailable"


def error_json(message: str, *, type_: str, code: str | None, param: str | None = None) -> bytes:
    """The OpenAI error object for these fields, UTF-8."""
    error = {"message": message, "type": type_, "param": param, "code": code}
    return json.dumps({"error": error}, separators=(",", ":")).encode()
