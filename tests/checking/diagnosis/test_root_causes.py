"""A failure of what is made of an operator names the one that explains it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opsmith.checking import Failure
from opsmith.checking.severity import explained_by


def failure(check: str, cause: str, input: str | None = None) -> Failure:
    return Failure(check, input, cause, f"{check} is wrong")


def raised(check: str, cause: str = "raises") -> Failure:
    return Failure(check, None, cause, f"{check} raises", evidence={"exception": "RuntimeError"})


def tangent(reverse: str) -> Failure:
    return Failure("forward_mode", "x", "scale", "it is wrong", None, {"reverse mode": reverse})


SHAPE = failure("forward", "shape", "result")
WRONG = failure("forward", "kernel-mismatch", "result")
SIGN = failure("gradient", "sign", "x")
UNSTEADY = failure("determinism", "nondeterministic", "x")
WRITES = failure("effects", "mutates-input", "x")


@pytest.mark.parametrize(
    ("late", "before", "explained"),
    [
        (failure("fake", "fake-mismatch", "result"), [SHAPE], "forward"),
        (failure("opcheck", "mutates-input", "y"), [SIGN, WRITES], "effects"),
        (failure("compile", "kernel-mismatch", "x"), [SIGN], "gradient"),
        (failure("export", "raises"), [SIGN, WRITES], "effects"),
        (failure("vmap", "kernel-mismatch", "y"), [SIGN], None),
        (failure("autocast", "side-effect"), [SHAPE], None),
        (raised("gradient"), [WRITES], None),
        (raised("gradient"), [SHAPE], "forward"),
        (raised("gradient", "empty"), [SHAPE], "forward"),
        (failure("gradient", "sign", "x"), [SHAPE], None),
        (raised("memory"), [SHAPE], None),
        (tangent("wrong as well"), [WRONG], "forward"),
        (tangent("right"), [WRONG], None),
        (tangent("wrong as well"), [SIGN], None),
        (failure("effects", "mutates-saved", "x"), [UNSTEADY], "determinism"),
        (failure("effects", "mutates-saved", "y"), [UNSTEADY], None),
        (failure("effects", "mutates-saved"), [UNSTEADY], None),
        (failure("vmap", "raises"), [failure("vmap", "shape", "result")], None),
    ],
)
def test_what_explains_it(late: Failure, before: list[Failure], explained: str | None) -> None:
    assert explained_by(late, before) == explained


OF_RESULT = replace(failure("layouts", "layout", "x"), evidence={"result": "`y`"})


@pytest.mark.parametrize(
    ("late", "explained"),
    [
        (failure("layouts", "layout", "x"), "gradient"),
        (failure("effects", "mutates-saved", "x"), "gradient"),
        (OF_RESULT, None),
        (failure("layouts", "mutates-input", "x"), None),
        (failure("effects", "side-effect", "x"), None),
    ],
)
def test_a_wrong_gradient_explains_what_is_said_of_gradients_alone(
    late: Failure, explained: str | None
) -> None:
    assert explained_by(late, [], [SIGN]) == explained


def test_what_follows_itself_explains_nothing() -> None:
    follower = Failure("forward_mode", None, "raises", "it raises", follows="gradient")
    assert explained_by(failure("compile", "raises"), [follower]) is None
