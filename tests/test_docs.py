"""The docs are held to the code: what the server answers and accepts is written down."""

from __future__ import annotations

import ast
import json
import logging
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from engine.config import flag_name, load, sections
from gateway.api.openapi import template
from gateway.api.routes import ROUTES, routes
from gateway.config import Settings
from gateway.responses.semantic import budget
from tests import docs
from tests.fakes.gateway import make_app, running

ROOT = Path(__file__).parent.parent
HTTP_API = (ROOT / "docs/http-api.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs/guides/operations.md").read_text(encoding="utf-8")
PAGES = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
EVERY = [route for own in make_app()[ROUTES].values() for route in own]


@pytest.mark.parametrize("page", ["configuration.md", "http-api.md", "translation.md"])
def test_the_generated_parts_of_a_page_are_those_of_the_code(page: str) -> None:
    written = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert written == docs.renewed(written, docs.parts()[page]), "stale: run python -m tests.docs"


def test_the_docs_stay_short() -> None:
    """Words are words: the bars and dashes of tables are not read."""
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    assert len(texts.pop("decisions.md").split()) <= 5_000
    assert len(texts.pop("lab-notebook.md").split()) <= 8_000
    assert sum(len(re.findall(r"[^\s|]*\w[^\s|]*", text)) for text in texts.values()) <= 32_000


def test_every_setting_says_what_it_means() -> None:
    tables = [
        kind for field in Settings.model_fields.values() for kind in (field.annotation, *get_args(field.annotation))
    ]
    models = [kind for kind in tables if isinstance(kind, type) and issubclass(kind, BaseModel)]
    assert len(models) == len(Settings.model_fields)
    assert not {name for model in models for name, field in model.model_fields.items() if not field.description}


def test_the_application_answers_nothing_else() -> None:
    assert sorted(routes(make_app())) == sorted({(route.method, template(route.path)) for route in EVERY})


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
    page = (ROOT / "docs/guides/semantic-cache.md").read_text(encoding="utf-8")
    assert not {field.name for field in fields(budget.Figures) if f"`{field.name}`" not in page}


async def test_the_line_of_a_request_is_documented_name_by_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvasir.access")
    async with running() as gateway:
        await gateway.post("/v1/completions", {"model": "demo", "prompt": "Hello."})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvasir.access"]
    text = OPERATIONS.split("One INFO line per request:\n\n", 1)[1].split("\n\n", 1)[0]
    documented, written = re.findall(r"(\w+)=", text), re.findall(r"(\w+)=", line)
    assert [name for name in documented if name in written] == written  # what is empty is left out
    source = (ROOT / "gateway/api/middleware.py").read_text(encoding="utf-8")
    fields = source.split("return Fields(", 1)[1].split("\n    )", 1)[0]
    assert documented == re.findall(r"^        (\w+)=", fields, re.MULTILINE)


def named(module: str) -> Iterator[str]:
    """The files and folders that a cell of the table of modules stands for: of names behind a folder or a file each is
    in the same folder as that, and of names in brackets in the folder before them."""
    place, _, inside = module.partition(" (")
    first, *others = place.replace("`", "").split()
    if "`" in inside:
        yield from (first + name for name in inside.replace("`", "").rstrip(")").split())
    else:
        folder = first[: first.rstrip("/").rindex("/") + 1]
        yield from (first, *(folder + name for name in others))


def test_the_table_of_modules_has_every_file_and_no_other() -> None:
    table = (ROOT / "docs/architecture.md").read_text().split("\n## Modules\n", 1)[1].split("\n## ", 1)[0]
    names = {name for module in re.findall(r"^\| (`[^|]*?) \|", table, re.MULTILINE) for name in named(module)}
    assert not {name for name in names if not (ROOT / name).exists()}
    sources = (path for package in ("gateway", "engine") for path in (ROOT / package).rglob("*.py"))
    files = {path.relative_to(ROOT).as_posix() for path in sources if path.name != "__init__.py"}
    folders = tuple(name for name in names if name.endswith("/"))
    assert not {file for file in files - names if not file.startswith(folders)}


RECORDS = {"changelog.md", "decisions.md", "lab-notebook.md"}
"""Pages that tell of a day: the files that they name may be gone since."""


def test_every_source_that_a_page_names_is_there() -> None:
    places = (ROOT / folder for folder in ("deploy", "engine", "gateway", "tests"))
    files = [f"/{path.relative_to(ROOT)}" for place in places for path in place.rglob("*.*")]
    for page in PAGES:
        named = re.findall(r"(?<![\w/.])((?:\w+/)*\w+\.(?:py|c))\b", page.read_text())
        gone = {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
        assert not gone or page.name in RECORDS, f"{page.name}: {gone}"


def test_every_figure_of_the_readme_has_a_script_and_is_in_the_notebook() -> None:
    table = (ROOT / "README.md").read_text().split("| what | figure | script |", 1)[1].split("\n\n", 1)[0]
    scripts = re.findall(r"\| `(\w+)` \|$", table, re.MULTILINE)
    notebook = (ROOT / "docs/lab-notebook.md").read_text()
    assert scripts
    assert not {
        name for name in scripts if not (ROOT / f"tests/bench/{name}.py").exists() or f"`{name}" not in notebook
    }


CLIENT_FLAGS = {"--wait", "--url", "--key", "--errors", "--tenant", "--namespace", "--api-key-env"}
COMMON_FLAGS = {"--config", "--help", "--help-all", "--slow", "--replica"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_settings_and_flags_that_a_page_shows_are_taken(page: Path, tmp_path: Path) -> None:
    """Blocks of TOML of one page are one file: what is said of a tenant needs the tenant."""
    text, file = page.read_text(encoding="utf-8"), tmp_path / "kvasir.toml"
    blocks = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ours = [block for block in blocks if tomllib.loads(block).keys() <= Settings.model_fields.keys()]
    file.write_text("\n".join(ours), encoding="utf-8")
    load(Settings, file=file, environ={}, flags={})
    commands = re.findall(r"^\$ (?:\S*/)?(?:kvasir|serve)\b.*$", text, re.MULTILINE)
    paths = (f"{section}.{name}" for section, model in sections(Settings).items() for name in model.model_fields)
    known = {*map(flag_name, paths), *CLIENT_FLAGS, *COMMON_FLAGS}
    assert not {flag for command in commands for flag in re.findall(r"--[a-z-]+", command)} - known


def names_of(path: Path) -> set[str]:
    """Functions, classes and methods of a file, as `name` and `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{one.name}" for one in functions}
    return names


def test_every_function_that_a_page_names_is_there() -> None:
    named = [one for page in PAGES for one in re.findall(r"`([\w/]+\.py):([\w.]+)`", page.read_text())]
    assert len(named) > 20
    assert not {(path, name) for path, name in named if name not in names_of(ROOT / path)}


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    plain = (heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE))
    return {re.sub(r"[^\w-]", "", heading) for heading in plain}


def test_every_link_of_the_docs_leads_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
