"""HTTP requests made of an OpenAPI document: right ones, those with one thing wrong, and those that are nobody's."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, urlencode

from hypothesis import strategies as st

from tests.fakes.bodies import BODIES
from tests.fakes.instances import PLAIN, broken, instances

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "BREW")
NOWHERE = ("/v1", "/v2/chat/completions", "/v1/models/", "/admin", "//", "/%ff", "/v1/models/%ff%fe", "/%2e%2e")
STRANGE_MODELS = ("other", "a/b:c", "")


@dataclass(frozen=True)
class Asking:
    """One request. `fits` says that nothing of its form is wrong, so that only its meaning can be."""

    method: str
    target: str  # path and query, encoded
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    template: str = ""  # the path that the document has; empty when the request was sent elsewhere
    value: Any = field(default=None, compare=False)  # what the body says, when it is JSON and nothing was done to it
    fits: bool = False


def askings(
    document: Mapping[str, Any], headers: Mapping[str, Mapping[str, str]], made: Mapping[str, Sequence[str]]
) -> st.SearchStrategy[Asking]:
    """`headers`: by tag, what a client of that dialect sends. `made`: by its name in paths, ids of what there is."""
    definitions = {f"#/components/schemas/{name}": one for name, one in document["components"]["schemas"].items()}
    whole = _by_tag(document, headers, made, definitions, lambda bodies: bodies)
    wrong = _by_tag(document, headers, made, definitions, lambda bodies: broken(bodies), fits=False)
    return _mixed([(4, whole), (4, wrong), (1, _elsewhere(whole)), (1, _garbled(whole)), (2, _with_odd_headers(whole))])


def _by_tag(
    document: Mapping[str, Any],
    headers: Mapping[str, Mapping[str, str]],
    made: Mapping[str, Sequence[str]],
    definitions: Mapping[str, Any],
    made_of: Callable[[st.SearchStrategy[Any]], st.SearchStrategy[Any]],
    *,
    fits: bool = True,
) -> st.SearchStrategy[Asking]:
    """Each dialect as often as another, whatever it has of routes; those with a body more often than those without."""
    found: dict[str, list[tuple[int, st.SearchStrategy[Asking]]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            targets = _targets(path, operation, made, definitions)
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            for tag in operation["tags"]:
                bodies = None if content is None else made_of(_bodies(content, tag, BODIES.get(path, ()), definitions))
                asked = _asked(path, method, targets, bodies, headers.get(tag, {}), fits=fits)
                found.setdefault(tag, []).append((1 if bodies is None else 6, asked))
    return _mixed([(4 if tag in headers else 1, _mixed(several)) for tag, several in found.items()])


def _mixed(weighted: Sequence[tuple[int, st.SearchStrategy[Asking]]]) -> st.SearchStrategy[Asking]:
    """One of them, each as often as its weight says."""
    choices = [index for index, (weight, _) in enumerate(weighted) for _ in range(weight)]
    return st.sampled_from(choices).flatmap(lambda index: weighted[index][1])


def _bodies(
    content: Any, tag: str, rich: Sequence[Any], definitions: Mapping[str, Any]
) -> st.SearchStrategy[dict[str, Any]]:
    """Values that fit the dialect's schema: the example's and the rich ones, some with more of what the schema has, and
    others that are of the schema alone, mostly for a model that there is."""
    several = content["schema"].get("anyOf", [content["schema"]])
    schema = next((one for one in several if one["$ref"].rpartition("/")[2].startswith(f"{tag}_")), several[0])
    example = content["examples"].get(tag, {}).get("value", {})
    model = {"model": example["model"]} if "model" in example else {}
    fitting = instances(schema, definitions)
    known = st.sampled_from([example, *rich])

    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        how = draw(st.sampled_from(("known", "known", "known", "more", "more", "model", "model", "strange")))
        if how == "known":
            return dict(draw(known))
        value = draw(fitting)
        if how == "more":
            return {**value, **draw(known)}
        strange = {"model": draw(st.sampled_from(STRANGE_MODELS))} if model and how == "strange" else model
        return {**value, **strange}

    return build()


def _targets(
    path: str, operation: Mapping[str, Any], made: Mapping[str, Sequence[str]], definitions: Mapping[str, Any]
) -> st.SearchStrategy[str]:
    """Path and query."""
    parts = {"model": st.sampled_from(("demo",) * 8 + STRANGE_MODELS)}
    parts |= {name: st.one_of(st.sampled_from(ids), st.sampled_from(ids), PLAIN) for name, ids in made.items()}
    query = {
        one["name"]: instances(one["schema"], definitions) for one in operation["parameters"] if one["in"] == "query"
    }

    @st.composite
    def build(draw: st.DrawFn) -> str:
        asked = re.sub(r"\{(\w+)\}", lambda name: _part(draw(parts.get(name[1], PLAIN))), path)
        given = {name: draw(one) for name, one in query.items() if draw(st.booleans())}
        written = {name: one if isinstance(one, str) else json.dumps(one) for name, one in given.items()}
        return asked + (f"?{urlencode(written)}" if written else "")

    return build()


def _part(text: str) -> str:
    return quote(text or "x", safe="")


def _written(value: Any) -> bytes:
    """As Python's json does: NaN, half characters and all."""
    return json.dumps(value).encode()


def _asked(
    path: str,
    method: str,
    targets: st.SearchStrategy[str],
    bodies: st.SearchStrategy[Any] | None,
    headers: Mapping[str, str],
    *,
    fits: bool = True,
) -> st.SearchStrategy[Asking]:
    def build(target: str, value: Any) -> Asking:
        return Asking(
            method=method.upper(),
            target=target,
            body=None if bodies is None else _written(value),
            headers=tuple(headers.items()),
            template=path,
            value=value,
            fits=fits,
        )

    return st.builds(build, targets, st.none() if bodies is None else bodies)


@st.composite
def _elsewhere(draw: st.DrawFn, whole: st.SearchStrategy[Asking]) -> Asking:
    """Another method, or a path that nobody has, or that is nearly one."""
    asking = draw(whole)
    path, _, query = asking.target.partition("?")
    moved = draw(
        st.one_of(
            st.just(path),
            st.sampled_from((path + "/", "/" + path, path + "/x", path[:-1] or "/", path.upper(), path + "%00")),
            st.sampled_from(NOWHERE),
            PLAIN.map(lambda text: "/" + quote(text, safe="")),
        )
    )
    method = draw(st.sampled_from(METHODS))
    return replace(
        asking, method=method, target=moved + (f"?{query}" if query else ""), template="", fits=False, value=None
    )


@st.composite
def _garbled(draw: st.DrawFn, whole: st.SearchStrategy[Asking]) -> Asking:
    """A body that is no JSON, or is written oddly."""
    asking = draw(whole)
    body = asking.body or b"{}"
    cut = draw(st.integers(0, len(body)))
    garbled = draw(
        st.one_of(
            st.binary(max_size=60),
            st.just(body[:cut]),
            st.just(body[:cut] + b"\xff" + body[cut:]),
            st.just(b"\xef\xbb\xbf" + body),
            st.just(body.decode().encode("utf-16")),
            st.sampled_from((b"", b" ", b"null", b"[]", b"0", b'"x"', b"{", b"{}{}", b'{"model":"demo","model":"x"}')),
            st.sampled_from((b"[" * 100_000, b'{"a":' * 30_000, b'{"model":' + b"9" * 5_000 + b"}", b"1e400")),
        )
    )
    return replace(asking, body=garbled, value=None, fits=False)


@st.composite
def _with_odd_headers(draw: st.DrawFn, whole: st.SearchStrategy[Asking]) -> Asking:
    """Headers of another dialect, twice the same, wrong encodings, long ones."""
    asking = draw(whole)
    body = asking.body or b"{}"
    headers = [*asking.headers, *draw(st.lists(st.sampled_from(HEADERS), min_size=1, max_size=4))]
    packed = draw(st.sampled_from(("", "", "gzip", "deflate", "identity", "br", "cut", "none")))
    if packed in ("gzip", "cut"):
        headers.append(("Content-Encoding", "gzip"))
        body = gzip.compress(body, mtime=0)[: None if packed == "gzip" else -9]
    elif packed == "deflate":
        headers.append(("Content-Encoding", "deflate"))
        body = zlib.compress(body)
    elif packed:
        headers.append(("Content-Encoding", "gzip" if packed == "none" else packed))
    return replace(asking, headers=tuple(headers), body=body, fits=False, value=None)


HEADERS = [
    ("anthropic-version", "2023-06-01"),
    ("anthropic-version", "2026-10-21"),
    ("anthropic-version", "tomorrow"),
    ("anthropic-version", ""),
    ("anthropic-beta", "a,b"),
    ("x-api-key", "k"),
    ("x-goog-api-key", "k"),
    ("x-goog-api-client", "genai"),
    ("Authorization", "Bearer k"),
    ("Authorization", "Basic Og=="),
    ("Authorization", "Bearer"),
    ("Content-Type", "text/plain"),
    ("Content-Type", "application/json; charset=utf-16"),
    ("Content-Type", "multipart/form-data; boundary=x"),
    ("Content-Type", "///"),
    ("Accept", "application/xml"),
    ("X-Request-Id", "mine-1"),
    ("X-Request-Id", "no good id"),
    ("X-Request-Id", "x" * 500),
    ("x-kvasir-namespace", "nobody"),
    ("x-kvasir-namespace", "private"),
    ("x-kvasir-namespace", ""),
    ("Cookie", "a=b; c"),
    ("X-Long", "y" * 7000),
    ("X-Latin", "\xe9\xff"),
    ("Range", "bytes=0-1"),
    ("If-None-Match", "*"),
    ("x-stainless-timeout", "NOT_GIVEN"),
    ("Expect", "100-continue"),
    ("Expect", "nothing"),
]
