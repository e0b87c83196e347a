"""The docs are held to the code: what the server answers and accepts is written down."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gateway import errors
from gateway.api.dialect import Route
from gateway.api.fields import Parameter
from gateway.api.gemini.contents import PART
from gateway.api.gemini.parameters import GENERATION
from gateway.api.gemini.tools import TOOL
from gateway.api.openapi import template
from gateway.api.routes import ROUTES, routes
from gateway.responses.semantic import budget
from tests.fakes.gateway import make_app, running

HTTP_API = (Path(__file__).parent.parent / "docs/http-api.md").read_text(encoding="utf-8")
OPERATIONS = (Path(__file__).parent.parent / "docs/operations.md").read_text(encoding="utf-8")
NESTED = {"generationConfig": GENERATION, "parts": PART, "tools": TOOL}
"""Tables of the Gemini API below those of its routes, by what their chapter is called."""
SECTIONS = {
    "used": "### Parameters",
    "none": "### Accepted without effect",
    "left_out": "### Left out",
    "refused": "### Refused",
}
ROUTES_OF = make_app()[ROUTES]
EVERY = [route for own in ROUTES_OF.values() for route in own]


def title(route: Route) -> str:
    return f"{route.method} {template(route.path)}"


def chapter(route: Route) -> str:
    """The text below a route's heading, up to the next one. Routes with the very same table may share a chapter, and
    those of two versions of an API."""
    same = [one for one in EVERY if one is route or one.parameters is route.parameters is not None]
    headings = [f"\n## {title(one)}\n" for one in (route, *same)]
    headings.append(headings[0].replace("/v1beta/", "/v1/"))
    heading = next((one for one in headings if one in HTTP_API), headings[0])
    return HTTP_API.split(heading, 1)[1].split("\n## ", 1)[0]


def documented() -> list[Any]:
    """Every parameter of every route, with its route."""
    return [
        pytest.param(route, parameter, id=f"{title(route)} {parameter.name}")
        for route in EVERY
        for parameter in (*(route.parameters or {}).values(), *(route.form or {}).values())
    ]


def test_every_route_is_documented_with_the_key_it_wants() -> None:
    for route in EVERY:
        key = "-" if route.key == "none" else route.key
        assert re.search(rf"^\| `{re.escape(title(route))}` \|.*\| {key} \|$", HTTP_API, re.MULTILINE), title(route)


def test_no_route_is_documented_that_is_not_there() -> None:
    rows = re.findall(r"^\| `((?:GET|POST|PUT|PATCH|DELETE) /[^`]*)` \|", HTTP_API, re.MULTILINE)
    assert sorted(set(rows)) == sorted({title(route) for route in EVERY})


def test_the_application_answers_nothing_else() -> None:
    assert sorted(routes(make_app())) == sorted({(route.method, template(route.path)) for route in EVERY})


@pytest.mark.parametrize(("route", "parameter"), documented())
def test_every_parameter_is_documented_as_what_becomes_of_it(route: Route, parameter: Parameter) -> None:
    row = f"| `{parameter.name}` | {parameter.accepts} | {parameter.does} |"
    _, found, rest = chapter(route).partition(f"\n{SECTIONS[parameter.effect]}\n")
    assert found
    assert row in rest.split("\n### ", 1)[0]


@pytest.mark.parametrize(
    ("name", "parameter"), [(name, parameter) for name, table in NESTED.items() for parameter in table.values()]
)
def test_every_field_inside_of_a_field_is_documented(name: str, parameter: Parameter) -> None:
    _, found, rest = HTTP_API.partition(f"\n## Gemini: {name}\n")
    assert found
    inside = rest.split("\n## ", 1)[0].partition(f"\n{SECTIONS[parameter.effect]}\n")[2].split("\n### ", 1)[0]
    assert f"| `{parameter.name}` | {parameter.accepts} | {parameter.does} |" in inside


@pytest.mark.parametrize("route", [one for one in EVERY if one.query], ids=title)
def test_every_parameter_of_a_url_is_documented(route: Route) -> None:
    for parameter in route.query.values():
        assert f"| `{parameter.name}` | {parameter.accepts} | {parameter.does} |" in chapter(route)


async def test_every_metric_is_documented_and_no_other() -> None:
    async with running() as gateway:
        exposed = set(re.findall(r"^# TYPE (\w+)", (await gateway.get("/metrics"))[1], re.MULTILINE))
    documented = set(re.findall(r"`(kvasir_\w+)`", HTTP_API))
    assert documented == exposed


async def test_what_the_response_cache_counts_is_documented() -> None:
    async with running() as gateway:
        counted = json.loads((await gateway.get("/admin/stats"))[1])["response_cache"]["events"]
    for event in counted:
        assert f"`{event}`" in HTTP_API, event


def test_what_is_told_of_a_budget_is_documented() -> None:
    page = (Path(__file__).parent.parent / "docs/semantic-cache.md").read_text(encoding="utf-8")
    assert not {field.name for field in fields(budget.Figures) if f"`{field.name}`" not in page}


async def test_the_line_of_a_request_is_documented_name_by_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvasir.access")
    async with running() as gateway:
        await gateway.post("/v1/completions", {"model": "demo", "prompt": "Hello."})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvasir.access"]
    text = OPERATIONS.split("One INFO line per request:\n\n", 1)[1].split("\n\n", 1)[0]
    documented, written = re.findall(r"(\w+)=", text), re.findall(r"(\w+)=", line)
    assert [name for name in documented if name in written] == written  # what is empty is left out
    source = (Path(__file__).parent.parent / "gateway/api/middleware.py").read_text(encoding="utf-8")
    assert documented == ["request_id", *re.findall(r'^        \("(\w+)", ', source, re.MULTILINE)]


def test_every_error_code_is_documented() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KvasirError)]
    for kind in kinds:
        assert f"| {kind.status} | `{kind.type}` |" in HTTP_API
        assert kind.code is None or f"`{kind.code}`" in HTTP_API
    sources = (Path(__file__).parent.parent / "gateway/api").rglob("*.py")
    codes = {code for path in sources for code in re.findall(r'code="(\w+)"', path.read_text(encoding="utf-8"))}
    assert not {code for code in codes if f"`{code}`" not in HTTP_API}


def named(room: str) -> Iterator[str]:
    """The files and folders that a cell of the table of rooms stands for: of names behind a folder or a file each is
    in the same folder as that, and of names in brackets in the folder before them."""
    place, _, inside = room.partition(" (")
    first, *others = place.replace("`", "").split()
    if "`" in inside:
        yield from (first + name for name in inside.replace("`", "").rstrip(")").split())
    else:
        folder = first[: first.rstrip("/").rindex("/") + 1]
        yield from (first, *(folder + name for name in others))


def test_the_table_of_rooms_has_every_file_and_no_other() -> None:
    root = Path(__file__).parent.parent
    table = (root / "docs/architecture.md").read_text().split("\n## Rooms\n", 1)[1].split("\n## ", 1)[0]
    names = {name for room in re.findall(r"^\| (`[^|]*?) \|", table, re.MULTILINE) for name in named(room)}
    assert not {name for name in names if not (root / name).exists()}
    sources = (path for package in ("gateway", "engine") for path in (root / package).rglob("*.py"))
    files = {path.relative_to(root).as_posix() for path in sources if path.name != "__init__.py"}
    folders = tuple(name for name in names if name.endswith("/"))
    assert not {file for file in files - names if not file.startswith(folders)}


RECORDS = {"changelog.md", "decisions.md", "lab-notebook.md"}
"""Pages that tell of a day: the files that they name may be gone since."""


def test_every_source_that_a_page_names_is_there() -> None:
    root = Path(__file__).parent.parent
    places = (root / folder for folder in ("deploy", "engine", "gateway", "tests"))
    files = [f"/{path.relative_to(root)}" for place in places for path in place.rglob("*.*")]
    for page in (root / "README.md", *root.glob("docs/*.md")):
        named = re.findall(r"(?<![\w/.])((?:\w+/)*\w+\.(?:py|c))\b", page.read_text())
        gone = {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
        assert not gone or page.name in RECORDS, f"{page.name}: {gone}"


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    plain = (heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE))
    return {re.sub(r"[^\w-]", "", heading) for heading in plain}


def test_every_link_of_the_docs_leads_somewhere() -> None:
    root = Path(__file__).parent.parent
    for page in (root / "README.md", *root.glob("docs/*.md")):
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
