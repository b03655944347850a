"""The chats that drive a seed: prompt to a borrower, prompt and answer to a lender, think, and on with the next turn.

Some edit their history, go away in the middle, ask for a renewal or for an end; some share a beginning.
A client that is refused tries again. Invariant: each request submitted is answered once, or its engine crashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvlease.registry.values import ConversationId, EndOrder, EndReason, EndScope, LeaseId, TenantId

from tests.sim.borrower import BorrowerParty
from tests.sim.borrower_turn import BorrowerTurn
from tests.sim.endpoint import Endpoint
from tests.sim.lender import LenderParty, LenderTurn
from tests.sim.network import Network
from tests.sim.plan import Plan
from tests.sim.promises import Promises
from tests.sim.registry import RegistryParty
from tests.sim.tokens import Tokens
from tests.sim.world import Party, World

_ALPHABET: Final = 50


class Conversation(Party):
    """One chat, at a client that never fails."""

    def __init__(
        self,
        number: int,
        plan: Plan,
        network: Network,
        registries: Sequence[RegistryParty],
        borrowers: list[BorrowerParty],
        lenders: list[LenderParty],
        tokens: Tokens,
        promises: Promises,
    ) -> None:
        super().__init__(f"conversation{number}")
        self._promises: Final = promises
        self.plan = plan
        self.tenant: Final = TenantId(f"tenant{number % plan.tenants}")
        self.conversation: Final = ConversationId(self.name)
        self.history: list[int] = list(range(8)) if number % 3 else []
        """Most begin alike: a system prompt."""
        self.turns_left = plan.turns
        self.waiting: BorrowerTurn | LenderTurn | None = None
        self._waiting_at: BorrowerParty | LenderParty | None = None
        self._network, self._world = network, network.world
        self.endpoint: Final = Endpoint(registries, first=plan.first_for(number))
        self._borrowers, self._lenders, self._tokens = borrowers, lenders, tokens
        self._lender = self._world.rng.choice(lenders)
        self._lease: LeaseId | None = None
        self._requests = 0

    def start(self) -> None:
        self._think()

    @property
    def idle(self) -> bool:
        return self.waiting is None

    def say(self, borrower: BorrowerParty, prompt: list[int], *, branch: bool = False) -> None:
        """Sends a prompt to be prefilled; unless it is only a branch, the turn goes on at the lender."""
        self._requests += 1
        turn = BorrowerTurn(
            request_id=f"{self.name}.{self._requests}",
            tenant=self.tenant,
            conversation=self.conversation if self._world.chance(0.8) else None,
            lease_id=self._lease if self._world.chance(0.3) else None,
            text=self._tokens.text(tuple(prompt)),
            done=lambda finished: None if branch else self._prefilled(turn, prompt, finished),
        )
        if not branch:
            self.waiting, self._waiting_at = turn, borrower
        self._world.after(self._network.latency(), borrower, lambda: borrower.submit(turn))
        if self._world.chance(self.plan.abort):
            self._world.after(self._world.between(1, 60), borrower, lambda: borrower.abort(turn))

    def next_turn(self) -> None:
        if self.turns_left <= 0 or not self.idle:
            return
        borrower = self._world.rng.choice(self._borrowers)
        if not borrower.up or not self._lender.up:
            self._think()
            return
        self.turns_left -= 1
        prompt = self._edited() + self._words(2, 10)
        self.say(borrower, prompt)
        if self._world.chance(self.plan.branch):
            other = self._world.rng.choice(self._borrowers)
            if other.up:
                self.say(other, prompt[:-1] + self._words(1, 4), branch=True)

    def crashed(self, party: Party) -> None:
        """If this engine worked on the turn, or it was on its way there, the turn is lost."""
        if self.waiting is not None and party is self._waiting_at:
            self.waiting = None
            self._think()

    def _prefilled(self, turn: BorrowerTurn, prompt: list[int], finished: bool) -> None:
        if turn is not self.waiting:
            return
        self.waiting = None
        if not finished:
            self._think()
            return
        if self._world.chance(0.15):
            self._lender = self._world.rng.choice(self._lenders)
        lender = self._lender
        if not lender.up:
            self._think()
            return
        text = prompt + self._words(4, 14)
        served = LenderTurn(
            tenant=self.tenant,
            conversation=None if self._world.chance(self.plan.anonymous) else self.conversation,
            text=self._tokens.text(tuple(text)),
            prompt_tokens=len(prompt),
            done=lambda lease_id: self._served(served, text, lease_id),
        )
        self.waiting, self._waiting_at = served, lender
        self._world.after(self._network.latency(), lender, lambda: lender.serve(served))
        if self._world.chance(self.plan.abort):
            self._world.after(self._world.between(1, 80), lender, lambda: lender.abort(served))

    def _served(self, turn: LenderTurn, text: list[int], lease_id: LeaseId | None) -> None:
        if turn is not self.waiting:
            return
        self.waiting = None
        self.history = text[:64]
        self._lease = lease_id
        registry, network, world = self.endpoint.registry(), self._network, self._world
        if lease_id is not None and world.chance(self.plan.renew):
            ttl_ms = world.between(0, 200)
            ask = lambda: registry.ask_renewal(self.tenant, lease_id, ttl_ms)  # noqa: E731
            world.after(world.between(5, 200), self, lambda: network.datagram(registry, ask))
        if world.chance(self.plan.end):
            order = self._end(lease_id)
            acknowledged = lambda leases: self._promises.end_acknowledged(self.tenant, leases)  # noqa: E731
            network.datagram(registry, lambda: registry.end(order, acknowledged))
        self._think()

    def _end(self, lease_id: LeaseId | None) -> EndOrder:
        """The conversation is closed, the lease released; or an operator drains the engine or ends a whole tenant."""
        targets: dict[EndScope, tuple[str, EndReason]] = {
            EndScope.CONVERSATION: (self.conversation, EndReason.RELEASED),
            EndScope.LEASE: (lease_id or "none", EndReason.RELEASED),
            EndScope.ENGINE: (self._lender.name, EndReason.DRAINED),
            EndScope.TENANT: ("", EndReason.RELEASED),
        }
        (scope,) = self._world.rng.choices(tuple(targets), (6, 2, 1, 1))
        target, reason = targets[scope]
        return EndOrder(tenant=self.tenant, scope=scope, target=target, reason=reason)

    def _think(self) -> None:
        self._world.after(self._world.between(2, 60), self, self.next_turn)

    def _words(self, low: int, high: int) -> list[int]:
        return [self._world.between(8, _ALPHABET) for _ in range(self._world.between(low, high))]

    def _edited(self) -> list[int]:
        """The history, or with the plan's probability one that differs: cut, changed, or something left out."""
        history = self.history
        if not history or not self._world.chance(self.plan.edit):
            return history
        at = self._world.between(0, len(history) - 1)
        match self._world.between(0, 2):
            case 0:
                return history[:at]
            case 1:
                return [*history[:at], history[at] + _ALPHABET, *history[at + 1 :]]
            case _:
                return history[:at] + history[at + self._world.between(1, 8) :]


class Traffic(Party):
    """Turns that a lender gets from elsewhere: they take blocks and slots, and lend, and nobody comes back for them."""

    def __init__(self, number: int, plan: Plan, world: World, lender: LenderParty, tokens: Tokens) -> None:
        super().__init__(f"traffic{number}")
        self.turns_left = plan.traffic
        self._world, self._lender, self._tokens = world, lender, tokens
        self._tenant: Final = TenantId("elsewhere")

    def start(self) -> None:
        self._world.after(self._world.between(1, 40), self, self._send)

    def _send(self) -> None:
        if self.turns_left <= 0:
            return
        self.turns_left -= 1
        world, lender = self._world, self._lender
        text = tuple(world.between(8, _ALPHABET) for _ in range(world.between(8, 28)))
        turn = LenderTurn(
            tenant=self._tenant,
            conversation=None,
            text=self._tokens.text(text),
            prompt_tokens=world.between(4, 8),
            done=lambda lease_id: None,
        )
        world.after(1, lender, lambda: lender.serve(turn))
        self.start()
