"""The token that etcd gives for a user and password, fetched when first needed and again when it is not valid any more.

A token is valid for some minutes of disuse, and at each member by itself: after a failover it may be unknown; and never
once its user's password has changed. So each login reads the password anew where it is in a file.
Invariant: one login at a time, however many calls wait for it; and no login at an endpoint that the others have left. A
password file that cannot be used never replaces what was read.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import grpc
import grpc.aio
from kvlease.etcd.credentials import EtcdCredentials
from kvlease.etcd.endpoints import Endpoint, Endpoints
from kvlease.etcd.errors import CredentialsInvalid
from kvlease.etcd.methods import AUTHENTICATE
from kvlease.etcdv3 import etcd_pb2 as pb

_NOT_ENABLED: Final = "authentication is not enabled"

_log = logging.getLogger(__name__)


class Login:
    """Holds the client's token."""

    def __init__(self, credentials: EtcdCredentials, endpoints: Endpoints) -> None:
        self._credentials: Final = credentials
        self._endpoints: Final = endpoints
        self._lock: Final = asyncio.Lock()
        self._token = ""
        self._password = ""
        self._fault = ""
        self._wanted = bool(credentials.user)

    async def token(self, endpoint: Endpoint, *, timeout_s: float) -> str:
        """The token, "" if none is needed. Raises AioRpcError, TimeoutError, CredentialsInvalid."""
        if not self._wanted:
            return self._token
        async with asyncio.timeout(timeout_s), self._lock:
            if self._wanted:
                if self._endpoints.current is not endpoint:
                    raise TimeoutError(f"{endpoint.name} has been left")
                self._token = await self._authenticate(endpoint, timeout_s)
                self._wanted = False
            return self._token

    def forget(self, token: str) -> bool:
        """`token` was refused: fetch another one with the next call. False if there is no user to do that with."""
        if token == self._token:
            self._wanted = bool(self._credentials.user)
        return bool(self._credentials.user)

    async def _authenticate(self, endpoint: Endpoint, timeout_s: float) -> str:
        request = pb.AuthenticateRequest(name=self._credentials.user, password=await self._newest_password())
        try:
            return (await endpoint.unary(AUTHENTICATE, request, timeout_s=timeout_s, metadata=())).token
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION and _NOT_ENABLED in (error.details() or ""):
                return ""
            raise

    async def _newest_password(self) -> str:
        """The last good one while the file cannot be used, which is logged once. Raises CredentialsInvalid."""
        try:
            self._password = await asyncio.to_thread(self._credentials.read_password)
            self._fault = ""
        except CredentialsInvalid as error:
            if not self._password:
                raise
            if error.message != self._fault:
                self._fault = error.message
                _log.warning("the new password for etcd is not usable, the old one stays: %s", error.message)
        return self._password
