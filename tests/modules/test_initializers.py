"""Initialisers refuse invalid arguments when they are made."""

from typing import Any

import pytest

import opsmith


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        ("uniform", {"a": "a"}, "a"),
        ("normal", {"std": None}, "std"),
        ("constant", {"val": True}, "val"),
        ("kaiming_uniform", {"mode": 3}, "mode"),
    ],
)
def test_an_invalid_argument_is_named(function: str, arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(opsmith.errors.UsageError, match=f"argument: {name}"):
        getattr(opsmith.init, function)(**arguments)


def test_numbers_of_any_type_are_taken() -> None:
    assert opsmith.init.uniform(0, 1).arguments == (("a", 0), ("b", 1))
