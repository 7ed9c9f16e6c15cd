"""JSON documents that are damaged by chance: what a disk, an editor or another program makes of them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from opsmith.errors import OpsmithError

BRACKETS = 100_000
NESTED: list[Any] = []
for _ in range(300):
    NESTED = [NESTED]
RAW = ("1e999", "-1e999", "NaN", "-Infinity", "9" * 5000, "9" * 400, "[" * BRACKETS, '{"a":' * BRACKETS)
"""Texts in the place of a value that `json.dumps` does not write."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3.5, 5e-324, -1e308, 1e308, 2**63, -(10**300)),
    *("", "text", "\ud800", "a\udfffb", "\x1b[2J", "nan", "x" * 100_000),
    *([], {}, [None], {"a": 1}, [[[]]], NESTED),
)

Place = tuple[Any, Any]
"""A list or an object, and an index or a key of it."""


def places(value: Any) -> Iterator[Place]:
    """All places in a document."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def replaced(document: Any, place: Place, draw: random.Random) -> bytes:
    place[0][place[1]] = draw.choice(VALUES)
    return json.dumps(document).encode()


def written_raw(document: Any, place: Place, draw: random.Random) -> bytes:
    place[0][place[1]] = "the place"
    return json.dumps(document).replace('"the place"', draw.choice(RAW)).encode()


def deleted(document: Any, place: Place, draw: random.Random) -> bytes:
    del place[0][place[1]]
    return json.dumps(document).encode()


def renamed(document: Any, place: Place, draw: random.Random) -> bytes:
    if isinstance(place[0], dict):
        place[0][draw.choice(["x", "", "\ud83d", str(place[1]).upper()])] = place[0].pop(place[1])
    return json.dumps(document).encode()


def nested(document: Any, place: Place, draw: random.Random) -> bytes:
    value = place[0][place[1]]
    place[0][place[1]] = draw.choice([[value], {"value": value}, [value, value]])
    return json.dumps(document).encode()


def swapped(document: Any, place: Place, draw: random.Random) -> bytes:
    other = draw.choice([*places(document)])
    one, two = copy.deepcopy(place[0][place[1]]), copy.deepcopy(other[0][other[1]])
    other[0][other[1]] = one
    if any(each[0] is place[0] for each in places(document)):
        place[0][place[1]] = two
    return json.dumps(document).encode()


def truncated(document: Any, place: Place, draw: random.Random) -> bytes:
    text = json.dumps(document).encode()
    return text[: draw.randrange(len(text))]


def spliced(document: Any, place: Place, draw: random.Random) -> bytes:
    text = json.dumps(document).encode()
    at = draw.randrange(len(text))
    return text[:at] + draw.choice([b"\xff", b"\xc3(", b"\x00", b"\xed\xa0\x80", b"[" * BRACKETS]) + text[at:]


def flipped(document: Any, place: Place, draw: random.Random) -> bytes:
    text = bytearray(json.dumps(document).encode())
    text[draw.randrange(len(text))] ^= 1 << draw.randrange(8)
    return bytes(text)


def encoded(document: Any, place: Place, draw: random.Random) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode(
        draw.choice(["utf-8", "utf-8-sig", "utf-16", "utf-32"]), "surrogatepass"
    )


DAMAGES: tuple[Callable[[Any, Place, random.Random], bytes], ...] = (
    *(replaced, replaced, replaced, written_raw, deleted, renamed, nested),
    *(swapped, truncated, spliced, flipped, encoded),
)


def damaged(document: Any, seed: int) -> bytes:
    """The bytes of a document that was damaged at one to three places."""
    draw = random.Random(seed)
    made: Any = copy.deepcopy(document)
    for _ in range(draw.choice([0, 0, 1, 2])):
        owner, key = draw.choice([*places(made)])
        owner[key] = draw.choice(VALUES)
        if not [*places(made)]:
            break
    return draw.choice(DAMAGES)(made, draw.choice([*places(made)]), draw)


def refused_rightly(error: OpsmithError, file: Path, command: str) -> bool:
    """Return True if an error names the file, the place in it, what was expected and what came."""
    said = str(file) in error.problem and (error.where or "").startswith(str(file))
    helped = bool(error.expected and error.got) and command in (error.hint or "")
    return said and helped and len(str(error).encode()) < 2000
