"""Checks of the parts of a case: every error names the key, the value and the rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

V = TypeVar("V")


class CaseError(ValueError):
    """A case, or a case file, that cannot be: the text names the key, the value and the rule."""


class FrozenMapping(Mapping[str, V]):
    """A mapping that does not change, compares like a dict, hashes and pickles."""

    def __init__(self, items: Mapping[str, V] = {}) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> V:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def keys(where: str, data: object, known: set[str] | None) -> dict[str, Any]:
    """A copy of a JSON object whose keys are all known."""
    if not isinstance(data, Mapping):
        raise CaseError(f"{where} is {type_name(data)}: expected an object")
    for name in data:
        if known is not None and name not in known:
            raise CaseError(f"{name!r} is not a key of {where}: expected {listed(sorted(known))}")
    return dict(data)


def mapping(name: str, data: object) -> FrozenMapping[Any]:
    """A mapping with text for names."""
    if not isinstance(data, Mapping):
        raise CaseError(f"{name} is {type_name(data)}: expected names with values")
    for item in data:
        if not isinstance(item, str) or not item:
            raise CaseError(f"{name} has the name {item!r}: expected text")
    return FrozenMapping(data)


def items(name: str, data: object) -> list[Any]:
    """A copy of a list or tuple."""
    if not isinstance(data, list | tuple):
        raise CaseError(f"{name} is {type_name(data)}: expected a list")
    return list(data)


def record(name: str, data: object, form: type[Any], *, integers: bool = True) -> Any:
    """A named tuple `form` of a list with as many numbers, 0 or more each."""
    numbers = items(name, data)
    if len(numbers) != len(form._fields):
        raise CaseError(f"{name} has {len(numbers)} numbers: expected {', '.join(form._fields)}")
    if integers:
        for item, value in zip(form._fields, numbers, strict=True):
            integer(f"{name}.{item}", value, 0)
    return form(*numbers)


def integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse what is not an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise CaseError(f"{name} = {value!r} is {type_name(value)}: expected an integer")
    if value < low or (high is not None and value > high):
        limits = f"{low} or more" if high is None else f"{low} to {high}"
        raise CaseError(f"{name} = {value} is out of range: expected {limits}")


def one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Refuse what is not one of the known names."""
    if value not in known:
        raise CaseError(f"{name} = {value!r} is unknown: expected {listed(known)}")


def listed(names: Sequence[str]) -> str:
    """Names for an error text."""
    return "one of " + ", ".join(names) if names else "none"


def type_name(value: object) -> str:
    """The JSON type of a value, for an error text."""
    names = {bool: "true or false", int: "an integer", float: "a fraction", str: "text", list: "a list"}
    if value is None:
        return "null"
    return "an object" if isinstance(value, Mapping) else names.get(type(value), type(value).__name__)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for JSON that refuses a name given twice."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise CaseError(f"{name!r} stands twice in one object: expected it once")
        result[name] = value
    return result


def refuse_constant(text: str) -> None:
    """A `parse_constant` for JSON that refuses NaN and Infinity."""
    raise CaseError(f"{text} is not a JSON number")
