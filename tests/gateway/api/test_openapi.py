from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from gateway.api.dialect import SSE, Dialect, Route
from gateway.api.fields import Parameter, anything, boolean, choice, in_url, integer, text
from gateway.api.middleware import DIALECTS
from gateway.api.openai.wire import OPENAI
from gateway.api.openapi import OWN, document, template
from gateway.api.routes import ROUTES
from gateway.config import AuthSettings, TenantSettings
from tests.fakes.embedding import FakeTextModel, fake_embedder
from tests.fakes.fleet import FakeGateway
from tests.fakes.gateway import Gateway, make_app, running

ROUTES_OF = make_app()[ROUTES]
EVERY = [(name, route) for name, own in ROUTES_OF.items() for route in own]
WITH_BODY = [(name, route) for name, route in EVERY if route.parameters is not None]


def title(value: Any) -> str:
    return f"{value.method} {template(value.path)}" if isinstance(value, Route) else str(value)


async def nothing(http: Any) -> Any:
    """A handler of routes that are only written about."""
    raise NotImplementedError


def other() -> Dialect:
    return Dialect(
        name="other",
        title="Other",
        speaks=lambda http: False,
        headers=lambda request_id, elapsed_ms: {},
        error_json=lambda error, request_id: {},
        error_schema={"type": "object"},
        asking_headers={},
    )


def whole() -> dict[str, Any]:
    written: dict[str, Any] = json.loads(json.dumps(document(ROUTES_OF, DIALECTS, "1.2.3")))
    return written


def test_the_document_is_openapi() -> None:
    OpenAPIV31SpecValidator(whole()).validate()
    assert whole()["info"]["version"] == "1.2.3"


def test_every_route_is_in_it_with_its_dialect_and_media_types() -> None:
    paths = whole()["paths"]
    for name, route in EVERY:
        operation = paths[template(route.path)][route.method.lower()]
        assert name in operation["tags"]
        assert set(route.media) <= set(operation["responses"]["200"]["content"])
    assert sum(map(len, paths.values())) == len({(route.method, template(route.path)) for _, route in EVERY})


def test_no_two_paths_differ_only_in_the_names_of_their_parts() -> None:
    paths = list(whole()["paths"])
    assert len({re.sub(r"\{\w+\}", "{}", path) for path in paths}) == len(paths)


@pytest.mark.parametrize(("name", "route"), WITH_BODY, ids=title)
def test_a_route_that_may_stream_says_so(name: str, route: Route) -> None:
    assert (SSE in route.media) >= ("stream" in (route.parameters or {}))


@pytest.mark.parametrize(("name", "route"), WITH_BODY, ids=title)
def test_an_example_fits_what_the_document_says_of_it(name: str, route: Route) -> None:
    written = whole()
    body = written["paths"][template(route.path)][route.method.lower()]["requestBody"]["content"]["application/json"]
    assert body["examples"][name]["value"] == route.example
    jsonschema.Draft202012Validator({**body["schema"], "components": written["components"]}).validate(route.example)


async def existing(gateway: Gateway, route: Route, headers: Mapping[str, str]) -> str:
    """The route's path with names of what is there: `{name}`, or a key's `{id}`, is first made, as the example of its
    collection says."""
    embeds = "mbedContent" in route.path
    path = template(route.path).replace("{model}", "all-MiniLM-L6-v2" if embeds else "demo")
    collection, _, part = path.rpartition("/")
    if part != "{name}" and path != "/admin/keys/{id}":
        return path
    (example,) = [one.example for _, one in WITH_BODY if (one.method, template(one.path)) == ("POST", collection)]
    status, made, _ = await gateway.post(collection, example, headers=headers)
    assert status in (200, 201), made
    return f"{collection}/{made['name' if part == '{name}' else 'id'].rpartition('/')[2]}"


@pytest.mark.parametrize(("name", "route"), WITH_BODY, ids=title)
async def test_an_example_is_answered(name: str, route: Route) -> None:
    headers = next((dialect.asking_headers for dialect in DIALECTS if dialect.name == name), {})
    embedder = fake_embedder(FakeTextModel(max_tokens=64))
    options: dict[str, Any] = {}
    if route.path.startswith(("/admin/tenants", "/admin/keys")):  # an open server has none
        options["tenants"] = (TenantSettings(name="north", keys=("north-key-1",)),)
        options["auth"] = AuthSettings(admin_keys=("admin-key-1",))
        headers = {"Authorization": "Bearer admin-key-1"}
    async with running(embedder=embedder, fleet=FakeGateway().fleet, **options) as gateway:
        url = gateway.url + await existing(gateway, route, headers)
        body = dict(route.example or {})
        if "input_file_id" in body:
            body["input_file_id"] = (await gateway.sdk().files.create(file=b"x", purpose="batch")).id
        async with gateway.session.request(route.method, url, json=body, headers=headers) as answer:
            assert answer.status in (200, 201), await answer.text()


def test_every_parameter_says_what_becomes_of_it() -> None:
    table = {
        "a": Parameter("a", integer(0, 3), "-", "Counts."),
        "b": Parameter("b", boolean, "-", "Nobody cares.", "none"),
        "c": Parameter("c", choice("x", "y"), "-", "Not yet.", "refused", ("x",)),
        "d": Parameter("d", anything, "-", "Never.", "refused"),
        "e": Parameter("e", anything, "-", "Whatever."),
    }
    written = document({"openai": [Route("POST", "/x", nothing, "X.", table, ("a",))]}, [OPENAI], "1")
    assert written["components"]["schemas"]["openai_post_x"] == {
        "type": "object",
        "properties": {
            "a": {"description": "Counts.", "type": "integer", "minimum": 0, "maximum": 3},
            "b": {"description": "No effect: Nobody cares.", "anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "c": {"description": "Refused, but for x: Not yet.", "enum": [None, "x"]},
            "d": {"description": "Refused: Never.", "enum": [None]},
            "e": {"description": "Whatever."},
        },
        "required": ["a"],
    }


def test_a_path_of_several_dialects_is_documented_once_with_all_of_them() -> None:
    table = {"a": Parameter("a", text(), "-", "A.")}
    query = {"limit": Parameter("limit", in_url(integer(1, 9)), "-", "So many.")}
    routes = {
        "openai": [Route("POST", "/v1/models/{id:.+}", nothing, "One.", table)],
        "other": [Route("POST", "/v1/models/{id:.+}", nothing, "Two.", {}, query=query, media=(SSE,))],
        OWN: [Route("GET", "/", nothing, "Three.", key="none")],
    }
    written = document(routes, [other(), OPENAI], "1")
    OpenAPIV31SpecValidator(written).validate()
    (operation,) = written["paths"]["/v1/models/{id}"].values()
    assert operation["tags"] == ["openai", "other"]
    assert operation["summary"] == "One. Or: Two."
    assert [(one["name"], one["in"]) for one in operation["parameters"]] == [("id", "path"), ("limit", "query")]
    assert list(operation["responses"]["200"]["content"]) == ["application/json", "text/event-stream"]
    error = operation["responses"]["default"]["content"]["application/json"]["schema"]
    assert error == {"anyOf": [{"$ref": f"#/components/schemas/{name}_error"} for name in ("openai", "other")]}
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body == {
        "anyOf": [{"$ref": f"#/components/schemas/{name}_post_v1_models_id"} for name in ("openai", "other")]
    }
    assert written["paths"]["/"]["get"]["security"] == []
    own_error = written["paths"]["/"]["get"]["responses"]["default"]["content"]["application/json"]["schema"]
    assert own_error == {"$ref": "#/components/schemas/openai_error"}
