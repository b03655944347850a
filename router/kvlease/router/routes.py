"""Which engine serves a turn: the pure choice among prefill and decode engines.

No I/O and no clock: `now_ms` is a parameter, health and failures are told to it. Prefill goes to the engine with the
fewest turns outstanding; decode goes to the lender of the conversation's lease if it is one of ours, else likewise.

Invariant: `outstanding` of a target is the number of `begin` less the number of `finish` calls, never negative.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvlease.registry.values import Engine, EngineId, Located


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Health(StrEnum):
    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An engine the router was told of. `url` is a base URL without a trailing slash and without /v1."""

    role: Role
    url: str
    engine_id: EngineId | None = None
    """Set where the registry's idea of the engine's URL differs from ours."""


@dataclass(slots=True, kw_only=True)
class _State:
    outstanding: int = 0
    chosen: int = 0
    """When it was last chosen, in choices made: the smaller, the longer ago."""
    cool_until_ms: int | None = None
    health: Health = Health.UNKNOWN


def base_url(url: str) -> str:
    """`url` as two sides can compare it: without trailing slashes and without /v1."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Routes:
    """The engines of one router and what is known of them.

    `cooldown_ms` is how long a target that failed a turn is avoided.
    """

    def __init__(self, targets: Sequence[Target], *, cooldown_ms: int) -> None:
        self._states = {target: _State() for target in targets}
        self._cooldown_ms = cooldown_ms
        self._choices = 0
        self._lenders: frozenset[Target] | None = None

    def choose_prefill(self, now_ms: int, *, exclude: Collection[Target] = ()) -> Target | None:
        """The prefill engine with the fewest turns; None if all are excluded, down or cooling.

        A doubtful one is not tried: the decode engine can prefill, and waiting for a dead engine costs more.
        """
        return self._least(Role.PREFILL, exclude, lambda state: self._usable(state, now_ms))

    def choose_decode(
        self, now_ms: int, *, lender: Target | None = None, exclude: Collection[Target] = ()
    ) -> Target | None:
        """The lender if it is usable, else the decode engine with the fewest turns, doubtful ones last; None if all
        are excluded."""
        if lender is not None and lender not in exclude and self._usable(self._states[lender], now_ms):
            return self._chose(lender)
        best = self._least(Role.DECODE, exclude, lambda state: self._usable(state, now_ms))
        return best or self._least(Role.DECODE, exclude, lambda _: True)

    def lender(self, located: Located | None) -> Target | None:
        """The decode engine of ours that holds the located lease, by engine id where one is configured, else by URL."""
        if located is None or located.lease is None:
            return None
        url = base_url(located.api_url)
        for target in self.targets(Role.DECODE):
            if _is(target, located.lease.engine_id, url):
                return target
        return None

    def registered(self, engines: Iterable[Engine] | None) -> None:
        """The engines that the registry knows as lenders; None: it did not say."""
        if engines is None:
            self._lenders = None
            return
        known = [(engine.engine_id, base_url(engine.api_url)) for engine in engines]
        decode = self.targets(Role.DECODE)
        self._lenders = frozenset(t for t in decode if any(_is(t, engine_id, url) for engine_id, url in known))

    def lends(self, target: Target) -> bool | None:
        """Whether the registry knows the decode engine as a lender; None if it does not say so now."""
        return None if self._lenders is None else target in self._lenders

    def targets(self, role: Role | None = None) -> tuple[Target, ...]:
        return tuple(target for target in self._states if role is None or target.role is role)

    def begin(self, target: Target) -> None:
        """A turn is on its way to `target`; `finish` must follow."""
        self._states[target].outstanding += 1

    def finish(self, target: Target) -> None:
        """The turn left `target`, whatever became of it. Raises ValueError without a `begin`."""
        state = self._states[target]
        if state.outstanding == 0:
            raise ValueError(f"finish without begin: {target.url}")
        state.outstanding -= 1

    def outstanding(self, target: Target) -> int:
        return self._states[target].outstanding

    def failed(self, target: Target, now_ms: int) -> None:
        """`target` failed a turn: avoided until the cool-down is over."""
        self._states[target].cool_until_ms = now_ms + self._cooldown_ms

    def probed(self, target: Target, *, up: bool) -> None:
        """What a health probe saw. An engine that comes back is used at once."""
        state = self._states[target]
        if up and state.health is Health.DOWN:
            state.cool_until_ms = None
        state.health = Health.UP if up else Health.DOWN

    def health(self, target: Target) -> Health:
        return self._states[target].health

    def ready(self) -> bool:
        """Whether at least one engine of each role is up."""
        return all(any(self.health(t) is Health.UP for t in self.targets(role)) for role in Role)

    def _usable(self, state: _State, now_ms: int) -> bool:
        cooling = state.cool_until_ms is not None and now_ms < state.cool_until_ms
        return not cooling and state.health is not Health.DOWN

    def _least(self, role: Role, exclude: Collection[Target], fits: Callable[[_State], bool]) -> Target | None:
        candidates = [
            (state.outstanding, state.chosen, target)
            for target, state in self._states.items()
            if target.role is role and target not in exclude and fits(state)
        ]
        if not candidates:
            return None
        return self._chose(min(candidates, key=lambda candidate: candidate[:2])[2])

    def _chose(self, target: Target) -> Target:
        self._choices += 1
        self._states[target].chosen = self._choices
        return target


def _is(target: Target, engine_id: EngineId, url: str) -> bool:
    return target.engine_id == engine_id or (target.engine_id is None and target.url == url)
