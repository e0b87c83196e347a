"""How large a JSON Schema may be: nesting, references, properties and patterns, counted before anything follows them.

A gateway checks a schema before it walks through it, an engine before its compiler does. Iterative, so that no schema
is too deep for the check itself. Pure; standard library only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

MAX_NESTING: Final = 160
"""Objects and arrays inside of each other; a schema inside of a schema takes two of them."""
MAX_VALUES: Final = 50_000
"""Of all objects and arrays."""
MAX_REFERENCES: Final = 2_000
MAX_REFERENCE_CHAIN: Final = 256
"""References that lead to one another. The compiler follows each on its stack; 1,000 are too many for it."""
MAX_PROPERTIES: Final = 5_000
"""Of all schemas in a schema, as OpenAI allows; the compiler's time grows with their square."""
MAX_NUMBERS: Final = 2_000
"""Schemas of the types integer and number, each of which is a pattern of its own for the compiler: some 4 s."""
MAX_PATTERNS: Final = 500
MAX_PATTERN_CHARS: Final = 2_000


class SchemaError(ValueError):
    """A schema that is beyond a limit, or cannot be carried out. `path` leads to the reason, as in `properties.a.not`;
    empty is the root."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


def check_schema(schema: Any) -> str | None:
    """Raises SchemaError for what is beyond the limits of this module. Returns the path of a reference that leads
    back to where it stands: of a recursive schema, None for others."""
    return _check_chains(_Walk(schema))


class _Walk:
    """One pass over all objects and arrays, in the order in which they are written.

    starts      id -> number of an object or array: its place in that order
    ends        number -> the first number behind its inside
    references  (number of the object, target), by number
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self.starts: dict[int, int] = {}
        self.ends: list[int] = []
        self.references: list[tuple[int, str]] = []
        self._parents: list[tuple[int, str]] = []  # of each number: the parent's number, and the key in it
        self._values = self._properties = self._patterns = self._numbers = 0
        self._visit(root)
        self.references.sort(key=lambda one: one[0])  # a `$ref` may stand behind the objects beside it

    def path(self, number: int, key: str = "") -> str:
        """As error messages of the HTTP API write it."""
        keys = [key] if key else []
        while number > 0:
            number, step = self._parents[number]
            keys.append(step)
        return "".join(step if step[0] == "[" else f".{step}" for step in reversed(keys) if step).removeprefix(".")

    def _visit(self, root: Any) -> None:
        if not isinstance(root, dict | list):
            return
        open_ones = [self._enter(root, -1, "")]
        while open_ones:
            number, items = open_ones[-1]
            entered = None
            for key, value in items:
                self._values += 1
                if self._values > MAX_VALUES:
                    raise SchemaError("", f"it may have {MAX_VALUES} values altogether")
                if isinstance(value, dict | list):
                    entered = self._enter(value, number, key)
                    break
                self._note(number, key, value)
            if entered is None:
                self.ends[number] = len(self.ends)
                open_ones.pop()
            else:
                open_ones.append(entered)
                if len(open_ones) > MAX_NESTING:
                    raise SchemaError(self.path(entered[0]), f"it may be nested {MAX_NESTING} levels deep")

    def _enter(self, value: Any, parent: int, key: str) -> tuple[int, Iterator[tuple[str, Any]]]:
        number = len(self.ends)
        self.starts[id(value)] = number
        self.ends.append(0)
        self._parents.append((parent, key))
        if isinstance(value, list):
            return number, ((f"[{index}]", item) for index, item in enumerate(value))
        if key in ("properties", "patternProperties"):
            self._count_properties(value, number, patterns=key == "patternProperties")
        return number, iter(value.items())

    def _count_properties(self, named: dict[str, Any], number: int, *, patterns: bool) -> None:
        self._properties += len(named)
        if self._properties > MAX_PROPERTIES:
            raise SchemaError(self.path(number), f"a schema may have {MAX_PROPERTIES} properties altogether")
        for pattern in named if patterns else ():
            self._count_pattern(pattern, number)

    def _count_pattern(self, pattern: str, number: int, key: str = "") -> None:
        self._patterns += 1
        if self._patterns > MAX_PATTERNS:
            raise SchemaError(self.path(number, key), f"a schema may have {MAX_PATTERNS} patterns altogether")
        if len(pattern) > MAX_PATTERN_CHARS:
            raise SchemaError(self.path(number, key), f"a pattern may be {MAX_PATTERN_CHARS} characters long")

    def _note(self, number: int, key: str, value: Any) -> None:
        if not isinstance(value, str):
            return
        if key == "$ref":
            self.references.append((number, value))
            if len(self.references) > MAX_REFERENCES:
                raise SchemaError(self.path(number, key), f"a schema may have {MAX_REFERENCES} references")
        elif key == "pattern":
            self._count_pattern(value, number, key)
        elif value in ("integer", "number") and "type" in (key, self._parents[number][1]):
            self._numbers += 1
            if self._numbers > MAX_NUMBERS:
                raise SchemaError(self.path(number, key), f"a schema may have {MAX_NUMBERS} numbers altogether")


def follow_reference(root: Any, reference: Any) -> Any:
    """Where a reference leads inside of the root. None elsewhere: the compiler says what it thinks of it."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place = root
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and key in place:
            place = place[key]
        elif isinstance(place, list) and key.isdecimal() and len(key) < 9 and int(key) < len(place):
            place = place[int(key)]
        else:
            return None
    return place


def _check_chains(walk: _Walk) -> str | None:
    """Follows every reference into its target, and on from the references there. Returns the path of one that leads
    back to where it stands."""
    targets = _targets(walk)
    places = [number for number, _ in walk.references]
    done: set[int] = set()
    recursive: list[int] = []

    def follow(index: int, within: tuple[int, ...], first: int) -> None:
        start = targets[index]
        if start is None or start in done:
            return
        if start in within:
            recursive.append(index)
            return
        if len(within) == MAX_REFERENCE_CHAIN:
            reason = f"references may lead on {MAX_REFERENCE_CHAIN} times"
            raise SchemaError(walk.path(places[first], "$ref"), reason)
        for inner in range(bisect_left(places, start), bisect_left(places, walk.ends[start])):
            follow(inner, (*within, start), first)
        done.add(start)

    for index in range(len(places)):
        follow(index, (), index)
    return walk.path(places[recursive[0]], "$ref") if recursive else None


def _targets(walk: _Walk) -> list[int | None]:
    """The number that each reference leads to; None for what is no object or array of the schema."""
    found: dict[str, int | None] = {}
    for _, reference in walk.references:
        if reference not in found:
            target = follow_reference(walk.root, reference)
            found[reference] = walk.starts.get(id(target)) if isinstance(target, dict | list) else None
    return [found[reference] for _, reference in walk.references]
