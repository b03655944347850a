"""Which calls change weights, and what a weights version is after each.

No engine: how calls come to be heard is in tests/engines/test_inprocess_weights.py.
"""

from __future__ import annotations

import functools

import pytest
from kvlease.connector.weights import HARMLESS, CallKind, Weights, call_kind

HARMLESS_KIND, FORGETS, CHANGES = CallKind.HARMLESS, CallKind.FORGETS_KV, CallKind.CHANGES_WEIGHTS


def my_own(_: object) -> None:
    """A function that an operator sends to the workers."""


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "kind"),
    [
        ("execute_model", (), {}, HARMLESS_KIND),
        ("sleep", (), {"level": 0}, FORGETS),
        ("sleep", (), {"level": 1}, FORGETS),
        ("sleep", (1,), {}, FORGETS),
        ("sleep", (), {}, FORGETS),
        ("sleep", (), {"level": 2}, CHANGES),
        ("sleep", ("2",), {}, CHANGES),
        ("discard", (("kv_cache",),), {}, FORGETS),
        ("discard", (("kv_cache", "weights"),), {}, CHANGES),
        ("discard", (), {"tags": ["weights"]}, CHANGES),
        ("discard", (7,), {}, CHANGES),
        ("reload_weights", (), {}, CHANGES),
        ("update_weights", (), {}, CHANGES),
        ("apply_model", (), {}, CHANGES),
        ("a_method_of_a_newer_engine", (), {}, CHANGES),
        (my_own, (), {}, CHANGES),
        (functools.partial(my_own, 1), (), {}, CHANGES),
    ],
)
def test_what_a_call_does(method: object, args: tuple[object, ...], kwargs: dict[str, object], kind: CallKind) -> None:
    assert call_kind(method, args, kwargs) is kind


def test_an_operators_own_methods_are_harmless_by_name() -> None:
    assert call_kind(my_own, (), {}, {"my_own"}) is HARMLESS_KIND
    assert call_kind("my_own", (), {}, {"my_own"}) is HARMLESS_KIND


def test_a_function_is_not_harmless_because_it_bears_a_harmless_name() -> None:
    def execute_model(_: object) -> None:
        """Not the engine's."""

    assert execute_model.__name__ in HARMLESS
    assert call_kind(execute_model, (), {}) is CHANGES


def test_a_change_makes_a_version_of_its_own_until_somebody_names_it() -> None:
    weights = Weights("0")
    assert weights.changed("a1", empty=True)
    assert (weights.version, weights.unnamed, weights.mixed) == ("0, changed in place (a1)", True, False)
    assert not weights.changed("a2", empty=False), "one nameless version is as good as another"
    assert (weights.version, weights.mixed) == ("0, changed in place (a1)", True)
    weights.named("step-17")
    assert (weights.version, weights.unnamed, weights.mixed) == ("0, step-17", False, True)
    weights.forgotten()
    assert not weights.mixed
    assert weights.changed("a3", empty=True)
    assert weights.version == "0, changed in place (a3)"
