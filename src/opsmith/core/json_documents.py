"""Reading of JSON documents that opsmith wrote: checked by a JSON schema, and made into dataclasses."""

from __future__ import annotations

import json
import sys
import typing
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

from opsmith import errors
from opsmith.core.call_arguments import shown

LONGEST = 400
"""Maximum number of characters of a line of an error: keys in a document may be of any length."""


@dataclass(frozen=True)
class DocumentFormat:
    """Format of documents: one entry, a list of entries, or the output of a command, which contains the list.

    Args:
        error: Class of the error for a document that does not fit.
        noun: Name of an entry: its key in `$defs` of the schema, and, in the plural, the key of the list.
        schema: File of the JSON schema of the command's output.
        hint: Advice on how to write a document.
    """

    error: type[errors.OpsmithError]
    noun: str
    schema: Path
    hint: str

    def read(self, text: str | bytes, file: Path | None = None) -> dict[str, Any]:
        """Return the entries of a document, by their JSON paths, as the schema describes them.

        Args:
            text: The document; bytes may be UTF-8, UTF-16 or UTF-32.
            file: The file with the document, for messages.

        Raises:
            OpsmithError: Of the class `error`, if the document does not fit.
        """
        try:
            document = json.loads(text, parse_constant=_refuse_constant)
            mismatch = self._mismatch(document)
        except (ValueError, RecursionError) as error:
            mismatch = {"expected": "JSON, not nested too deeply", "got": str(error), "where": ""}
        if mismatch:
            raise self.refusal(file, **mismatch)
        path, several = "$", document
        if isinstance(document, dict):
            if f"{self.noun}s" not in document:
                return {path: document}
            path, several = f"$.{self.noun}s", document[f"{self.noun}s"]
        return {f"{path}[{position}]": entry for position, entry in enumerate(several)}

    def refusal(self, file: Path | None, expected: str, got: str, where: str) -> errors.OpsmithError:
        """Return the error for a document.

        Args:
            file: The file with the document.
            expected: The expected value.
            got: The value that was read.
            where: Path of the value in the document, such as `$.cases[0]`.
        """
        subject = "the text" if file is None else f"`{file}`"
        return self.error(
            f"{subject} is not a {self.noun} that this version of opsmith wrote",
            expected=_cut(expected),
            got=_cut(got),
            where=": ".join(filter(None, [str(file or ""), _cut(where)])) or None,
            hint=self.hint,
        )

    def _mismatch(self, document: Any) -> dict[str, str]:
        """Return the first mismatch of a document: the expected value, the value read, and its path."""
        from jsonschema import Draft202012Validator, validators

        schema = json.loads(self.schema.read_text(encoding="utf-8"))
        entry = {"$ref": f"#/$defs/{self.noun}"}
        if isinstance(document, list):
            schema = {"$defs": schema["$defs"], "type": "array", "items": entry}
        elif not (isinstance(document, dict) and f"{self.noun}s" in document):
            schema = {"$defs": schema["$defs"], **entry}
        # In JSON Schema, numbers are unbounded, and 1.0 is an integer.
        numbers = {
            name: lambda _, value, kinds=kinds: type(value) in kinds and abs(value) <= sys.float_info.max
            for name, kinds in {"integer": (int,), "number": (int, float)}.items()
        }
        checker = Draft202012Validator.TYPE_CHECKER.redefine_many(numbers)
        found = validators.extend(Draft202012Validator, type_checker=checker)(schema).iter_errors(document)
        # A wrong version explains all other mismatches; otherwise the outermost mismatch is reported.
        error = min(found, key=lambda each: (each.validator != "const", len(each.path)), default=None)
        if error is None:
            return {}
        rule, value = error.validator, error.validator_value
        if rule == "required":
            missing = ", ".join(f"`{name}`" for name in value if name not in error.instance)
            there = ", ".join(f"`{name}`" for name in error.instance)
            got = f"the keys {there}" if there else "no keys"
            return {"expected": f"the keys {missing}", "got": got, "where": error.json_path}
        words = [] if isinstance(value, dict) else [_in_words(rule, value)]
        words += [error.schema["description"]] if "description" in error.schema else []
        return {"expected": ": ".join(words), "got": shown(error.instance), "where": error.json_path}


def from_json(value: Any, annotation: Any) -> Any:
    """Make a dataclass of a JSON object that fits it; lists become tuples, and unknown keys are ignored.

    Args:
        value: The JSON object, which was checked by its schema.
        annotation: The dataclass. Its annotations may be dataclasses, `tuple[X, ...]` and JSON's own types.

    Example:
        >>> from dataclasses import make_dataclass
        >>> Point = make_dataclass("Point", [("x", float), ("labels", tuple[str, ...], ())])
        >>> from_json({"x": 1.0, "labels": ["a"]}, Point)
        Point(x=1.0, labels=('a',))
    """
    if is_dataclass(annotation):
        kinds = typing.get_type_hints(annotation)
        given = {name: from_json(value[name], kind) for name, kind in kinds.items() if name in value}
        return annotation(**given)  # type: ignore[operator]  # it is a class
    if typing.get_origin(annotation) is tuple:
        return tuple(from_json(each, typing.get_args(annotation)[0]) for each in value)
    return value


_TYPES = {
    "object": "an object",
    "array": "a list",
    "string": "a string",
    "number": "a finite number",
    "integer": "a whole number",
    "boolean": "true or false",
    "null": "null",
}
_RULES = {"const": "{}", "enum": "one of {}", "minimum": "{} or more", "maximum": "{} or less"}


def _in_words(rule: str, value: Any) -> str:
    """Return a description of the values that a rule of JSON Schema allows."""
    if rule == "type":
        return " or ".join(_TYPES[each] for each in (value if isinstance(value, list) else [value]))
    return _RULES.get(rule, f"{rule} {{}}").format(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which JSON does not have")
