"""The docs are held to the code: what the server answers and accepts is written down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway import errors
from gateway.api.fields import Parameter
from gateway.api.openai.parameters import CHAT, COMPLETION
from gateway.api.routes import routes
from tests.fakes.gateway import running

HTTP_API = (Path(__file__).parent.parent / "docs/http-api.md").read_text(encoding="utf-8")
SECTIONS = {"used": "### Parameters", "none": "### Accepted without effect", "refused": "### Refused"}


def section(route: str, heading: str) -> str:
    """The text below a heading of a route, up to the next one."""
    chapter = HTTP_API.split(f"\n## {route}\n", 1)[1].split("\n## ", 1)[0]
    return chapter.split(f"\n{heading}\n", 1)[1].split("\n### ", 1)[0]


async def test_every_route_is_documented() -> None:
    async with running() as gateway:
        for method, path in routes(gateway.app):
            assert f"| `{method} {path}` |" in HTTP_API


@pytest.mark.parametrize(
    ("route", "parameter"),
    [("POST /v1/chat/completions", parameter) for parameter in CHAT.values()]
    + [("POST /v1/completions", parameter) for parameter in COMPLETION.values()],
    ids=lambda value: value.name if isinstance(value, Parameter) else value,
)
def test_every_parameter_is_documented_as_what_becomes_of_it(route: str, parameter: Parameter) -> None:
    row = f"| `{parameter.name}` | {parameter.accepts} | {parameter.does} |"
    assert row in section(route, SECTIONS[parameter.effect])


async def test_every_metric_is_documented_and_no_other() -> None:
    async with running() as gateway:
        exposed = set(re.findall(r"^# TYPE (\w+)", (await gateway.get("/metrics"))[1], re.MULTILINE))
    documented = set(re.findall(r"`(kvasir_\w+)`", HTTP_API))
    assert documented == exposed


def test_every_error_code_is_documented() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KvasirError)]
    for kind in kinds:
        assert f"| {kind.status} | `{kind.type}` |" in HTTP_API
        assert kind.code is None or f"`{kind.code}`" in HTTP_API
    sources = (Path(__file__).parent.parent / "gateway/api").rglob("*.py")
    codes = {code for path in sources for code in re.findall(r'code="(\w+)"', path.read_text(encoding="utf-8"))}
    assert not {code for code in codes if f"`{code}`" not in HTTP_API}
