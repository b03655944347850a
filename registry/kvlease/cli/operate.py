"""Operators' questions to a registry, over the public client: leases, engines, end, drain, resolve, watch, doctor.

Asks and prints; decides nothing. Results go to stdout, faults to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import aclosing
from itertools import count

from kvlease.cli import exits
from kvlease.cli.diagnosis import Grade
from kvlease.cli.doctor import examine_deployment
from kvlease.cli.render import Output
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_credentials import Credentials, CredentialsInvalid
from kvlease.registry.errors import InvalidRequest, KvleaseError
from kvlease.registry.values import (
    DIGEST_BYTES,
    ConversationId,
    EndReason,
    EngineId,
    Hit,
    LeaseFilter,
    LeaseId,
    ResolveQuery,
    TenantId,
)


def main(options: argparse.Namespace) -> int:
    """Carry out a parsed command. Returns the exit status."""
    try:
        return asyncio.run(_run(options))
    except InvalidRequest as error:
        sys.stderr.write(f"kvlease {options.command}: {error.message}\n")
        return exits.USAGE
    except CredentialsInvalid as error:
        sys.stderr.write(f"kvlease {options.command}: {error}\n")
        return exits.USAGE
    except KvleaseError as error:
        sys.stderr.write(f"kvlease {options.command}: {options.registry}: {error.message} ({error.reason.value})\n")
        return exits.FAILED
    except (KeyboardInterrupt, BrokenPipeError):
        return exits.DONE


async def _run(options: argparse.Namespace) -> int:
    output = Output(as_json=options.json)
    async with RegistryClient(options.registry, credentials=_credentials(options)) as client:
        match options.command:
            case "leases":
                found = await client.list_leases(_selection(options), timeout_ms=options.timeout_ms)
                output.leases(found)
            case "engines":
                output.engines(await client.list_engines(timeout_ms=options.timeout_ms))
            case "end":
                output.ended(await _end(client, options))
            case "drain":
                return await _drain(client, options, output)
            case "doctor":
                return await _doctor(client, options, output)
            case "resolve":
                answer = await client.resolve_unary(_query(options), timeout_ms=options.timeout_ms)
                output.answer(answer, stride_tokens=options.stride_tokens)
                return exits.DONE if isinstance(answer, Hit) else exits.MISS
            case "watch":
                await _watch(client, options, output)
    return exits.DONE


async def _end(client: RegistryClient, options: argparse.Namespace) -> int:
    tenant = TenantId(options.tenant)
    if options.lease is not None:
        return await client.end_lease(tenant, LeaseId(options.lease), timeout_ms=options.timeout_ms)
    if options.conversation is not None:
        conversation = ConversationId(options.conversation)
        return await client.end_conversation(tenant, conversation, timeout_ms=options.timeout_ms)
    if options.engine is not None:
        return await client.end_engine(EngineId(options.engine), timeout_ms=options.timeout_ms)
    return await client.end_tenant(tenant, timeout_ms=options.timeout_ms)


async def _drain(client: RegistryClient, options: argparse.Namespace, output: Output) -> int:
    engine_id = EngineId(options.engine)
    known = {x.engine.engine_id for x in await client.list_engines(timeout_ms=options.timeout_ms)}
    if engine_id not in known:
        sys.stderr.write(f"kvlease drain: {options.registry} knows no engine {engine_id}; see: kvlease engines\n")
        return exits.FAILED
    output.ended(await client.end_engine(engine_id, EndReason.DRAINED, timeout_ms=options.timeout_ms))
    return exits.DONE


async def _doctor(client: RegistryClient, options: argparse.Namespace, output: Output) -> int:
    findings = await examine_deployment(client, options.registry, options.decode, timeout_ms=options.timeout_ms)
    output.findings(findings)
    problems = [x for x in findings if x.grade is Grade.PROBLEM]
    if problems and problems[0] is findings[0]:  # the registry itself: nothing else could be asked
        return exits.FAILED
    return exits.PROBLEMS if problems else exits.DONE


def _credentials(options: argparse.Namespace) -> Credentials:
    return Credentials(
        tls_ca=options.tls_ca, tls_cert=options.tls_cert, tls_key=options.tls_key, token_file=options.token_file
    )


async def _watch(client: RegistryClient, options: argparse.Namespace, output: Output) -> None:
    shown = count(1)
    async with aclosing(client.watch(_selection(options), from_revision=options.from_revision)) as news:
        async for item in news:
            for event in item.events:
                output.event(event)
                if next(shown) == options.count:
                    return


def _selection(options: argparse.Namespace) -> LeaseFilter:
    return LeaseFilter(
        tenant=TenantId(options.tenant) if options.tenant else None,
        engine_id=EngineId(options.engine) if options.engine else None,
        conversation=ConversationId(options.conversation) if options.conversation else None,
    )


def _query(options: argparse.Namespace) -> ResolveQuery:
    try:
        digests = bytes.fromhex(options.digests or "")
    except ValueError as error:
        raise InvalidRequest(f"--digests must be hex, {2 * DIGEST_BYTES} digits a digest", field="digests") from error
    return ResolveQuery(
        tenant=TenantId(options.tenant),
        lease_id=LeaseId(options.lease) if options.lease else None,
        conversation=ConversationId(options.conversation) if options.conversation else None,
        digests=digests,
        stride_tokens=options.stride_tokens if digests else 0,
    )
