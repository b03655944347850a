"""Operators' questions to a registry, over the public client: leases, engines, end, drain, resolve, watch and so on.

Asks and prints; decides nothing. Results go to stdout, faults to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Final

from kvlease.cli import exits
from kvlease.cli.diagnosis import Grade
from kvlease.cli.doctor import examine_deployment
from kvlease.cli.faults import sentence
from kvlease.cli.lease_ids import begun_by, starting
from kvlease.cli.render import Output
from kvlease.cli.visible import visible
from kvlease.registry.client import RegistryClient
from kvlease.registry.client_credentials import Credentials, CredentialsInvalid
from kvlease.registry.errors import Compacted, InvalidRequest, KvleaseError, RegistryUnavailable
from kvlease.registry.values import (
    DIGEST_BYTES,
    ConversationId,
    EndReason,
    EngineId,
    Hit,
    LeaseFilter,
    LeaseId,
    Miss,
    MissReason,
    ResolveQuery,
    TenantId,
)

_INTERRUPTED: Final = {
    "bench": "; its leases were taken back",
    "end": "; leases may have ended: see kvlease leases",
    "drain": "; leases may have ended: see kvlease leases",
}


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
        of_store = options.command == "leases" and options.from_store
        told = f"{error.message} ({error.reason.value})" if of_store else sentence(options.registry, error)
        sys.stderr.write(f"kvlease {options.command}: {visible(told)}\n")
        return exits.FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        if options.command == "watch":
            return exits.DONE
        sys.stderr.write(f"kvlease {options.command}: interrupted{_INTERRUPTED.get(options.command, '')}\n")
        return exits.FAILED


async def _run(options: argparse.Namespace) -> int:
    task = asyncio.current_task()
    if task is not None:
        # Between two callbacks of the loop: asyncio's own handler cancels in the midst of whatever runs.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    output = Output(as_json=options.json)
    if options.command == "leases" and options.from_store:
        from kvlease.cli.from_store import leases_from_store

        stored = await leases_from_store(options, _selection(options))
        output.leases(replace(stored, leases=tuple(starting(stored.leases, options.lease))))
        return exits.DONE
    async with RegistryClient(options.registry, credentials=_credentials(options)) as client:
        match options.command:
            case "leases":
                found = await client.list_leases(_selection(options), timeout_ms=options.timeout_ms)
                output.leases(replace(found, leases=tuple(starting(found.leases, options.lease))))
            case "engines":
                output.engines(await client.list_engines(timeout_ms=options.timeout_ms))
            case "end":
                await _end(client, options, output)
            case "drain":
                return await _drain(client, options, output)
            case "bench":
                return await _bench(client, options, output)
            case "doctor":
                return await _doctor(client, options, output)
            case "resolve":
                return await _resolve(client, options, output)
            case "watch":
                await _watch(client, options, output)
    return exits.DONE


async def _end(client: RegistryClient, options: argparse.Namespace, output: Output) -> None:
    tenant, timeout_ms = TenantId(options.tenant), options.timeout_ms
    if options.lease is not None:
        await _end_lease(client, tenant, LeaseId(options.lease), timeout_ms, output)
    elif options.conversation is not None:
        conversation = ConversationId(options.conversation)
        output.ended(await client.end_conversation(tenant, conversation, timeout_ms=timeout_ms))
    elif options.engine is not None:
        output.ended(await client.end_engine(EngineId(options.engine), timeout_ms=timeout_ms))
    else:
        output.ended(await client.end_tenant(tenant, timeout_ms=timeout_ms))


async def _end_lease(
    client: RegistryClient, tenant: TenantId, lease_id: LeaseId, timeout_ms: int, output: Output
) -> None:
    ended = await client.end_lease(tenant, lease_id, timeout_ms=timeout_ms)
    if not ended and (whole := await begun_by(client, tenant, lease_id, timeout_ms=timeout_ms)) is not None:
        ended, lease_id = await client.end_lease(tenant, whole, timeout_ms=timeout_ms), whole
    output.ended(ended, lease_id if ended else None)


async def _resolve(client: RegistryClient, options: argparse.Namespace, output: Output) -> int:
    query, timeout_ms = _query(options), options.timeout_ms
    answer = await client.resolve_unary(query, timeout_ms=timeout_ms)
    unknown = isinstance(answer, Miss) and answer.reason is MissReason.UNKNOWN
    if unknown and query.lease_id is not None and not query.digests:
        whole = await begun_by(client, query.tenant, query.lease_id, timeout_ms=timeout_ms)
        if whole is not None:
            answer = await client.resolve_unary(query._replace(lease_id=whole), timeout_ms=timeout_ms)
    output.answer(answer, stride_tokens=options.stride_tokens)
    return exits.DONE if isinstance(answer, Hit) else exits.MISS


async def _drain(client: RegistryClient, options: argparse.Namespace, output: Output) -> int:
    engine_id = EngineId(options.engine)
    known = {x.engine.engine_id for x in await client.list_engines(timeout_ms=options.timeout_ms)}
    if engine_id not in known:
        sys.stderr.write(f"kvlease drain: {options.registry} knows no engine {engine_id}; see: kvlease engines\n")
        return exits.FAILED
    output.ended(await client.end_engine(engine_id, EndReason.DRAINED, timeout_ms=options.timeout_ms))
    return exits.DONE


async def _bench(client: RegistryClient, options: argparse.Namespace, output: Output) -> int:
    from kvlease.cli.bench import BenchTerms, measure

    terms = BenchTerms(
        tenant=TenantId(options.tenant),
        engine_id=EngineId(options.engine_id),
        leases=options.leases,
        tokens=options.tokens,
        seconds=options.seconds,
        callers=options.callers,
        timeout_ms=options.timeout_ms,
    )
    report = await measure(client, terms)
    output.report(options.registry, report)
    failed = sum(figure.failed for figure in report.figures)
    if failed:
        sys.stderr.write(f"kvlease bench: {failed} calls did not find the lease that they asked for, or not in time\n")
    return exits.FAILED if failed else exits.DONE


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
    """Events until there were as many as wanted. Where some are lost, what there is now is listed in their place."""
    selection, revision, source, shown = _selection(options), options.from_revision, "", count(1)
    while True:
        try:
            async with aclosing(client.watch(selection, from_revision=revision, source=source)) as news:
                async for item in news:
                    for event in item.events:
                        if not event.lease.lease_id.startswith(options.lease):
                            continue
                        output.event(event)
                        if next(shown) == options.count:
                            return
        except (Compacted, RegistryUnavailable) as error:
            if isinstance(error, RegistryUnavailable) and not client.replicas.several:
                raise
            sys.stderr.write(
                f"kvlease watch: {visible(error.message)}; listing what there is now, and going on from there\n"
            )
            found = await client.list_leases(selection, timeout_ms=options.timeout_ms)
            output.listed(replace(found, leases=tuple(starting(found.leases, options.lease))))
            revision, source = found.revision, found.source


def _selection(options: argparse.Namespace) -> LeaseFilter:
    return LeaseFilter(
        tenant=TenantId(options.tenant) if options.tenant else None,
        engine_id=EngineId(options.engine) if options.engine else None,
        conversation=ConversationId(options.conversation) if options.conversation else None,
    )


def _query(options: argparse.Namespace) -> ResolveQuery:
    if not (options.lease or options.conversation or options.digests):
        raise InvalidRequest(
            "give --lease ID, --conversation ID or --digests HEX; `kvlease leases` shows what there is"
        )
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
