"""What a seed is like: sizes, terms, and how often each fault strikes. Drawn once, from the seed's PRNG.

Times are virtual milliseconds, scaled so that a lease's life, a READ and a pause are of the same order: that is where
they collide. Invariant: a healed plan has no faults and changes nothing else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

from kvlease.registry.values import OnDeadline

DOWN_MS: Final = 60
"""A party that crashed is back after so long at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities per occasion, and how bad it gets."""

    drop: float = 0.0
    duplicate: float = 0.0
    delayed: float = 0.0
    """A datagram that takes `long_ms` instead of a few milliseconds."""
    line_breaks: int = 0
    """Times in the safety phase that a session's stream breaks."""
    read_slow: float = 0.0
    """A READ that takes up to `long_ms`."""
    read_hangs: float = 0.0
    """A READ whose rest lands after the limit, or never."""
    read_fails: float = 0.0
    seal_torn: float = 0.0
    """A seal READ whose two words are sampled up to `long_ms` apart."""
    store_slow: float = 0.0
    """A request to the store, or a revision on its way to a replica, that takes a multiple of `long_ms`."""
    store_cuts: int = 0
    """Times that one replica and the store lose contact, in one direction or in both."""
    store_outages: int = 0
    """Times that nobody reaches the store."""
    store_expiries: int = 0
    """Times that the store lets keys go which somebody keeps."""
    compactions: int = 0
    restores: int = 0
    """Times that the store goes back to a snapshot."""
    twins: int = 0
    """Engines that are started a second time, under the same id and elsewhere."""
    link_late: float = 0.0
    """A lender's link that takes up to `long_ms` to make and tell a lease."""
    link_races: float = 0.0
    """A hash that is stored although its lease has just gone."""
    lie: float = 0.0
    pauses: int = 0
    crashes: int = 0
    long_ms: int = 1


NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    lenders: int
    borrowers: int
    ranks: int
    lender_blocks: int
    borrower_blocks: int
    lender_caching: bool
    borrower_caching: bool
    slots: int
    max_leased: int
    ttl_ms: int
    on_deadline: OnDeadline
    renewable: bool
    max_lifetime_ms: int
    """No renewal keeps a lease's blocks longer; 0: no limit."""
    registries: int
    replicated: bool
    """They share a store; if not, each has a memory of its own, and is told nothing of the others."""
    first_registry: int
    rolls: int
    """Times in the safety phase that all registries are restarted, one after the other; replicas the second time at
    once."""
    conversations: int
    tenants: int
    turns: int
    traffic: int
    """Turns that each lender gets from elsewhere."""
    edit: float
    """A turn that changes the history it goes on from."""
    branch: float
    """A turn that is asked twice, with two endings."""
    anonymous: float
    """A turn that is lent without a conversation, so that nothing supersedes its lease."""
    abort: float
    preempt: float
    renew: float
    """A turn after which somebody asks to renew its lease."""
    end: float
    """A turn after which somebody asks to end the conversation's leases."""
    safety_ms: int
    wait_ms: int
    read_limit_ms: int
    threshold_tokens: int
    step_ms: int
    heartbeat_ms: int
    suspect_ms: int
    session_ttl_ms: int
    silence_ms: int
    """After so long without an answer a lender leaves its registry."""
    beat_ms: int
    home_silent_ms: int
    max_staleness_ms: int
    commit_wait_ms: int
    engine_ttl_ms: int
    """Of the store's lease that an engine's keys hang on."""
    replica_ttl_ms: int
    """Of the one of a replica's own keys."""
    faults: Faults

    def first_for(self, number: int) -> int:
        """Where the client of this number begins: everybody at one place, or spread over replicas."""
        return self.first_registry + (number if self.replicated else 0)

    def healed(self) -> Plan:
        return replace(self, faults=NO_FAULTS, abort=0.0, preempt=0.0)


def replicated(plan: Plan) -> Plan:
    """The same, with the registries on a store."""
    return replace(plan, registries=max(2, plan.registries), replicated=True)


def draw(rng: random.Random) -> Plan:
    """The plan of a seed."""
    calm = rng.random() < 0.1
    shared = rng.random() < 0.3
    lender_blocks = rng.choice((24, 36, 48))
    return Plan(
        lenders=rng.choice((1, 2, 2, 3)),
        borrowers=rng.choice((1, 2)),
        ranks=rng.choice((1, 1, 1, 2)),
        lender_blocks=lender_blocks,
        borrower_blocks=rng.choice((20, 32, 48)),
        lender_caching=rng.random() < 0.7,
        borrower_caching=rng.random() < 0.5,
        slots=rng.choice((2, 4, 16)),
        max_leased=int(lender_blocks * rng.choice((0.5, 0.8, 1.0))),
        ttl_ms=rng.choice((0, 20, 60, 150, 400)),
        on_deadline=rng.choice((OnDeadline.LAPSE, OnDeadline.LAPSE, OnDeadline.END)),
        renewable=rng.random() < 0.5,
        max_lifetime_ms=rng.choice((0, 0, 80, 300)),
        registries=rng.choice((2, 2, 3) if shared else (1, 2, 2)),
        replicated=shared,
        first_registry=rng.choice((0, 1)),
        rolls=0 if calm else rng.choice((0, 1, 2)),
        conversations=rng.choice((3, 4, 5)),
        tenants=rng.choice((1, 1, 2)),
        turns=7,
        traffic=rng.choice((0, 8, 16)),
        edit=0.25,
        branch=0.5,
        anonymous=rng.choice((0.0, 0.5, 1.0)),
        abort=rng.choice((0.0, 0.1, 0.2)),
        preempt=rng.choice((0.0, 0.1)),
        renew=rng.choice((0.0, 0.3)),
        end=rng.choice((0.0, 0.1)),
        safety_ms=1_000,
        wait_ms=rng.choice((15, 40)),
        read_limit_ms=rng.choice((40, 80)),
        threshold_tokens=rng.choice((1, 8)),
        step_ms=rng.choice((2, 4)),
        heartbeat_ms=50,
        suspect_ms=150,
        session_ttl_ms=400,
        silence_ms=110,
        beat_ms=30,
        home_silent_ms=75,
        max_staleness_ms=120,
        commit_wait_ms=100,
        engine_ttl_ms=rng.choice((100, 200, 400)),
        replica_ttl_ms=rng.choice((150, 300)),
        faults=NO_FAULTS
        if calm
        else Faults(
            drop=rng.choice((0.0, 0.0, 0.1)),
            duplicate=rng.choice((0.0, 0.1)),
            delayed=rng.choice((0.0, 0.1, 0.2)),
            line_breaks=rng.choice((0, 1, 3)),
            read_slow=rng.choice((0.2, 0.5, 0.8)),
            read_hangs=rng.choice((0.0, 0.1, 0.2)),
            read_fails=rng.choice((0.0, 0.05)),
            seal_torn=rng.choice((0.0, 0.2, 0.5)),
            link_late=rng.choice((0.0, 0.1, 0.3)),
            link_races=rng.choice((0.0, 0.2, 1.0)),
            lie=rng.choice((0.0, 0.0, 0.3, 0.6)),
            pauses=rng.choice((0, 2, 5)),
            crashes=rng.choice((0, 1, 2)),
            long_ms=rng.choice((30, 60)),
            store_slow=rng.choice((0.0, 0.05, 0.2)),
            store_cuts=rng.choice((0, 2, 4)),
            store_outages=rng.choice((0, 0, 1)),
            store_expiries=rng.choice((0, 1, 2)),
            compactions=rng.choice((0, 2, 5)),
            restores=rng.choice((0, 0, 0, 1)),
            twins=rng.choice((0, 0, 1)),
        ),
    )
