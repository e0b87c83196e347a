"""The generated parts of pages of docs/: `python -m tests.docs` writes them.

They are made of the models of the settings, the route tables, the errors, /metrics and the forms of upstreams, and
stand between two comments in their page; all other text of a page is written by hand. tests/test_docs.py fails when a
part is stale.
"""

from __future__ import annotations

import asyncio
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.config import SHORT_FLAGS, sections
from gateway import errors
from gateway.api.dialect import Route
from gateway.api.fields import Parameter
from gateway.api.gemini.contents import PART
from gateway.api.gemini.parameters import GENERATION
from gateway.api.gemini.tools import TOOL
from gateway.api.openapi import OWN, template
from gateway.api.routes import ROUTES
from gateway.config import Settings
from gateway.upstreams.translation.base import DROPPED, FIELDS, Form
from tests.fakes import client_fields
from tests.fakes.gateway import make_app, running

DOCS = Path(__file__).parent.parent / "docs"
TITLES = {"openai": "OpenAI", "anthropic": "Anthropic", "gemini": "Gemini", OWN: "Kvasir"}
NESTED = {"generationConfig": GENERATION, "parts": PART, "tools": TOOL}
"""Tables of the Gemini API below those of its routes, by the field that they are in."""
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_BEGIN, _END = "<!-- begin generated: {} -->", "<!-- end generated -->"


class Chapter(NamedTuple):
    """A table of parameters. `listed` are those that are part of the table, whatever becomes of them."""

    title: str
    text: str
    listed: tuple[Parameter, ...]


def parts() -> dict[str, dict[str, str]]:
    """By page, the text of each of its generated parts."""
    every = {name: list(own) for name, own in make_app()[ROUTES].items()}
    return {
        "configuration.md": {"short flags": short_flags(), "settings": settings()},
        "http-api.md": {
            "routes": route_table(every),
            "errors": error_table(),
            "parameters": parameters(every),
            "metrics": metrics(asyncio.run(_exposition())),
        },
        "translation.md": {"fields": fields()},
    }


def renewed(page: str, generated: Mapping[str, str]) -> str:
    """The page with these parts in place of what it had. Each part has to be there."""
    for name, text in generated.items():
        begin, rest = page.split(f"{_BEGIN.format(name)}\n", 1)
        _, end = rest.split(_END, 1)
        page = f"{begin}{_BEGIN.format(name)}\n{text}\n{_END}{end}"
    return page


# -- settings ---------------------------------------------------------------------------------------------------------


def short_flags() -> str:
    return ", ".join(f"`{flag}` ({path})" for path, flag in SHORT_FLAGS.items())


def settings() -> str:
    """A chapter for each section, and for each list of tables, in the order of `Settings`."""
    plain = sections(Settings)
    chapters: list[str] = []
    for name, field in Settings.model_fields.items():
        if name in plain:
            chapters.append(_section(f"[{name}]", plain[name]))
        else:
            (table, *_) = typing.get_args(field.annotation)
            chapters.append(_section(f"[[{name}]]", table))
    return "\n\n".join(chapters)


def _section(title: str, model: type[BaseModel]) -> str:
    meaning = " ".join((model.__doc__ or "").split("\n\n")[0].split()).removeprefix(f"{title}: ")
    rows = [
        f"| `{name}` | {_kind(field)} | {_default(name, field)} | {' '.join((field.description or '').split())} |"
        for name, field in model.model_fields.items()
    ]
    head = "| setting | type | default | meaning |\n| --- | --- | --- | --- |"
    return "\n".join([f"## {title}", "", meaning[:1].upper() + meaning[1:], "", head, *rows])


_KINDS: Mapping[object, str] = {bool: "boolean", int: "integer", float: "number", str: "text", dict: "table"}


def _kind(field: FieldInfo) -> str:
    """The type of a setting, and its bounds."""
    rules = list(_metadata(field))
    limits = {name: getattr(rule, name) for rule in rules for name in ("ge", "gt", "le", "lt") if hasattr(rule, name)}
    if limits.keys() == {"ge", "le"}:
        return f"{_type_name(field.annotation)} {limits['ge']:.10g}…{limits['le']:.10g}"
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return " ".join([_type_name(field.annotation), *(f"{signs[name]}{limit:.10g}" for name, limit in limits.items())])


def _metadata(field: FieldInfo) -> Iterable[Any]:
    """Of the field, or of the type in `type | None`."""
    yield from field.metadata
    for one in typing.get_args(field.annotation):
        for rule in getattr(one, "__metadata__", ()):
            yield from getattr(rule, "metadata", (rule,))


def _type_name(kind: Any) -> str:
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _type_name(inside[0])
    if origin in (typing.Union, types.UnionType):
        return _type_name(next(one for one in inside if one is not type(None)))
    if origin is Literal:
        return "`" + "` `".join(inside) + "`"
    if origin is tuple:
        return "list"
    return _KINDS.get(origin or kind, "text")


def _default(name: str, field: FieldInfo) -> str:
    value = field.default
    if field.is_required():
        return "required"
    if value in (None, (), {}) or field.default_factory is not None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "`" + ",".join(map(str, value)) + "`"
    if isinstance(value, int) and name.endswith("bytes"):
        return next((f"{value // size} {unit}" for size, unit in _UNITS if value and value % size == 0), str(value))
    return f"{value:.10g}" if isinstance(value, int | float) else f"`{value}`"


# -- routes -----------------------------------------------------------------------------------------------------------


def title(route: Route) -> str:
    return f"{route.method} {template(route.path)}"


def shown(routes: Mapping[str, list[Route]]) -> list[tuple[str, Route]]:
    """Routes with their dialects. What the Gemini API has under /v1 as well as under /v1beta is there once."""
    beta = {title(route) for route in routes["gemini"] if "/v1beta/" in route.path}
    return [
        (name, route)
        for name, own in routes.items()
        for route in own
        if name != "gemini" or title(route).replace("/v1/", "/v1beta/") not in beta or title(route) in beta
    ]


_KEYS = {"tenant": "", "admin": " (admin key)", "none": " (no key)"}


def route_table(routes: Mapping[str, list[Route]]) -> str:
    rows = [
        f"| {TITLES[name]} | `{title(route)}` | {route.summary.rstrip('.')}{_KEYS[route.key]} |"
        for name, route in shown(routes)
    ]
    return "\n".join(["| API | route | what it does |", "| --- | --- | --- |", *rows])


def parameters(routes: Mapping[str, list[Route]]) -> str:
    """A chapter for each route that takes parameters, and for the objects inside of Gemini's."""
    listed = shown(routes)
    titles = [title(route) for _, route in listed]
    several = {one for one in titles if titles.count(one) > 1}
    chapters: list[Chapter] = []
    for name, route in listed:
        table = [*(route.parameters or {}).values(), *(route.form or {}).values()]
        if table or route.query:
            heading = f"{title(route)} ({TITLES[name]})" if title(route) in several else title(route)
            chapters.append(_chapter(heading, table, tuple(route.query.values()), chapters))
    for name, nested in NESTED.items():
        chapters.append(_chapter(f"Gemini: {name}", list(nested.values()), (), chapters))
    return "\n\n".join(chapter.text for chapter in chapters)


def _chapter(heading: str, table: list[Parameter], query: tuple[Parameter, ...], before: list[Chapter]) -> Chapter:
    """What is the same in an earlier chapter is named and not told again."""
    every = (*table, *query)
    model = max(before, key=lambda chapter: _common(every, chapter), default=None)
    lines: list[str] = []
    if model is not None and _common(every, model) >= min(3, len(every)):
        same = [one for one in every if _known(one, model)]
        names = "" if len(same) == len(every) else ": " + ", ".join(f"`{one.name}`" for one in same)
        lines.append(f"As in {model.title}{names}.")
        table = [one for one in table if one not in same]
        query = tuple(one for one in query if one not in same)
    if used := [one for one in table if one.effect == "used"]:
        lines.append(_table("parameter", used))
    if query:
        lines.append(_table("in the URL", query))
    for effect, meaning in (("none", "No effect"), ("left_out", "Left out and named"), ("refused", "Refused")):
        if rows := [one for one in table if one.effect == effect]:
            lines.append(f"{meaning}: {', '.join(map(_short, rows))}.")
    return Chapter(heading, "\n\n".join([f"## {heading}", *lines]), every)


def _common(table: Iterable[Parameter], chapter: Chapter) -> int:
    return sum(_known(one, chapter) for one in table)


def _known(parameter: Parameter, chapter: Chapter) -> bool:
    return any(_row(parameter) == _row(one) and parameter.effect == one.effect for one in chapter.listed)


def _short(parameter: Parameter) -> str:
    """Of one that does nothing; its reason is in the error, and in /docs."""
    if parameter.effect == "refused" and parameter.harmless:
        return f"`{parameter.name}` ({parameter.accepts.partition('only ')[2] or parameter.accepts} is accepted)"
    return f"`{parameter.name}`"


def _row(parameter: Parameter) -> str:
    return f"| `{parameter.name}` | {parameter.accepts} | {parameter.does} |"


def _table(what: str, rows: Iterable[Parameter]) -> str:
    return "\n".join([f"| {what} | accepts | meaning |", "| --- | --- | --- |", *map(_row, rows)])


# -- errors, metrics --------------------------------------------------------------------------------------------------


def error_table() -> str:
    """Status, type and codes, of the error classes and of what the APIs raise with codes of their own."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KvasirError)]
    codes: dict[tuple[int, str], list[str]] = {}
    for kind in kinds:
        codes.setdefault((kind.status, kind.type), []).append(kind.code or "")
    api = Path(errors.__file__).parent / "api"
    own = sorted({code for path in api.rglob("*.py") for code in re.findall(r'code="(\w+)"', path.read_text())})
    codes[400, "invalid_request_error"] += [code for code in own if all(code != kind.code for kind in kinds)]
    rows = [
        f"| {status} | `{kind}` | {', '.join(f'`{code}`' for code in dict.fromkeys(own) if code) or '-'} |"
        for (status, kind), own in sorted(codes.items())
    ]
    return "\n".join(["| status | type | codes |", "| --- | --- | --- |", *rows])


async def _exposition() -> str:
    async with running() as gateway:
        return (await gateway.get("/metrics"))[1]


def metrics(exposition: str) -> str:
    rows = [f"| `{name}` | {text} |" for name, text in re.findall(r"^# HELP (\w+) (.*)$", exposition, re.MULTILINE)]
    return "\n".join(["| metric | meaning |", "| --- | --- |", *rows])


# -- translation ------------------------------------------------------------------------------------------------------


def fields() -> str:
    """A chapter for each API of an upstream: how clients of the other APIs write a field, and what it becomes."""
    chapters = []
    for upstream, form in client_fields.CLIENTS.items():
        clients = [client for client in client_fields.CLIENTS if client != upstream]
        titles = [*(client_fields.CLIENTS[client].title for client in clients), f"**{form.title}**"]
        rows = [f"|{'|'.join(titles)}|", f"|{'|'.join('-' for _ in titles)}|"]
        for name in FIELDS:
            theirs = [client_fields.field_of(client, name) for client in clients]
            if any(theirs):
                rows.append(f"|{'|'.join(f'`{one}`' if one else '' for one in theirs)}|{_becomes(form, name)}|")
        chapters.append("\n".join([f"### To {form.title}", "", *rows]))
    return "\n\n".join(chapters)


def _becomes(form: Form, name: str) -> str:
    field = form.table.get(name)
    if field is None:
        return "drop" if name in DROPPED else "400"
    if not field.name:
        return "-"
    bounds = [f"{sign}{bound}" for sign, bound in (("≥", field.least), ("≤", field.most)) if isfinite(bound)]
    return "".join([f"`{field.name}`", *bounds])


def main(write: Callable[[Path, str], object] = Path.write_text) -> None:
    for name, generated in parts().items():
        page = DOCS / name
        write(page, renewed(page.read_text(encoding="utf-8"), generated))


if __name__ == "__main__":
    main()
