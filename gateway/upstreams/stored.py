"""Objects stored at upstreams (responses, files, containers): the ids that a request names, the ids that an answer
creates, and which tenant may name which. Pure, except for looking up an object's creator.

An upstream stores objects by its key: any request with the same key can name them. An *account* is all [[upstreams]] at
one host with one key and the same headers; it is shared when more than one tenant may use it.

Ids are looked for by the names that the APIs have for them (OpenAI's chats and Responses, Anthropic's messages,
Gemini's contents), at any depth, except in what is only data to the upstream: arguments and results of tools, schemas,
metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from gateway.config import ALL_TENANTS, UpstreamSettings
from gateway.errors import BadRequestError
from gateway.tasks import off_loop
from gateway.types import UpstreamRequest
from gateway.upstreams.routes import Route, may

MAX_IDS: Final = 1000
"""Ids in one request."""

MAX_CREATED: Final = 256
"""Ids of one answer, or event, that are remembered."""

_MAX_DEPTH: Final = 4
"""Levels: an event, a response, its output, an item."""

_NAMES: Final = frozenset(
    (
        "previous_response_id",
        "comparison_response_id",
        "file_id",
        "file_ids",
        "container_id",
        "vector_store_id",
        "vector_store_ids",
        "cachedContent",
        "cached_content",
        "fileSearchStoreNames",
        "file_search_store_names",
    )
)
"""Members whose value is an id, or a list of them."""

_URIS: Final = frozenset(("fileUri", "file_uri"))
"""Members whose value is an id unless it is a public address."""

_THINGS: Final = frozenset(("conversation", "container", "thread"))
"""Members whose value is an id, or an object with one."""

_OBJECTS: Final = _THINGS | {"audio"}
"""Members whose value may be an object with an id."""

_DATA: Final = frozenset(
    (
        "args",
        "input_schema",
        "json_schema",
        "labels",
        "logit_bias",
        "metadata",
        "parameters",
        "parametersJsonSchema",
        "response",
        "responseJsonSchema",
        "responseSchema",
        "schema",
    )
)
"""Members in which ids are only data."""

_SELF_CONTAINED: Final = frozenset(
    (
        "message",
        "additional_tools",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
    )
)
"""Types of Responses items that say everything themselves: their id is only a name. Of others the upstream may read
what it keeps under the id."""


class StoredId(NamedTuple):
    """An id, and where the request has it."""

    id: str
    path: str


def named_ids(values: Mapping[str, Any]) -> list[StoredId]:
    """The ids in a request, each once. Raises BadRequestError for more than MAX_IDS."""
    found: dict[str, StoredId] = {}
    items = values.get("input")
    if isinstance(items, list):
        found |= {one.id: one for one in _items(items)}
    left: list[tuple[str, Any]] = [("", values)]
    while left and len(found) <= MAX_IDS:
        path, value = left.pop()
        if isinstance(value, list):
            left += [(f"{path}[{index}]", one) for index, one in enumerate(value) if isinstance(one, dict | list)]
            continue
        for name, inside in value.items():
            where = f"{path}.{name}" if path else name
            for stored in _ids(name, inside, where):
                found.setdefault(stored.id, stored)
            if isinstance(inside, dict | list) and not _is_data(name, inside):
                left.append((where, inside))
    if len(found) > MAX_IDS:
        raise BadRequestError(f"A request can name {MAX_IDS} stored things at most.")
    return list(found.values())


def created_ids(value: Any) -> list[str]:
    """At most MAX_CREATED of a whole answer, or of one event of a stream: responses, their items, containers, and
    spoken answers."""
    found = dict.fromkeys(one for one in _created(value) if isinstance(one, str))
    return list(found)[:MAX_CREATED]


def _ids(name: str, value: Any, path: str) -> Iterator[StoredId]:
    if name in _NAMES:
        several = enumerate(value) if isinstance(value, list) else ()
        yield from [StoredId(one, f"{path}[{index}]") for index, one in several if isinstance(one, str)]
    elif name in _OBJECTS and isinstance(value, dict):
        value, path = value.get("id"), f"{path}.id"
    elif name not in _THINGS and not (name in _URIS and isinstance(value, str) and not is_public(value)):
        return
    if isinstance(value, str) and value:
        yield StoredId(value, path)


def _items(items: list[Any]) -> Iterator[StoredId]:
    """Ids in the input of a response: references, and items that the upstream may complete."""
    for index, item in enumerate(items):
        if not isinstance(item, dict) or not isinstance(item.get("id"), str):
            continue
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        complete = kind in _SELF_CONTAINED or (kind == "reasoning" and item.get("encrypted_content"))
        if not complete:
            yield StoredId(item["id"], f"input[{index}].id")


def _is_data(name: str, value: Any) -> bool:
    """`input` is a list of items, or else the arguments of a tool."""
    return name in _DATA or (name == "input" and isinstance(value, dict))


def is_public(uri: str) -> bool:
    """Whether it is a public URL, and no file of the upstream."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        return False
    own = (parts.hostname or "").endswith("googleapis.com")
    return parts.scheme in ("http", "https") and not own


def _created(value: Any, depth: int = 0) -> Iterator[Any]:
    if not isinstance(value, dict) or depth > _MAX_DEPTH:
        return
    for name in ("response", "message", "delta", "item"):  # what an event, or a choice, is about
        yield from _created(value.get(name), depth + 1)
    for name in ("output", "data", "choices"):
        for one in _list(value.get(name)):
            yield from _created(one, depth + 1)
    yield value.get("id")
    yield value.get("container_id")
    for name in ("container", "audio"):
        if isinstance(thing := value.get(name), dict):
            yield thing.get("id")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class Accounts:
    """Which upstreams share an account, and which accounts tenants share. `num_tenants` are configured."""

    def __init__(self, settings: Sequence[UpstreamSettings], keys: Mapping[str, str], num_tenants: int) -> None:
        self._account = {one.name: _account(one, keys.get(one.name)) for one in settings}
        self._foreign = {one.name: one.foreign_ids for one in settings}
        asking: dict[object, set[str]] = {}
        for one in settings:
            asking.setdefault(self._account[one.name], set()).update(one.tenants)
        self._shared = {
            account for account, names in asking.items() if len(names) > 1 or (ALL_TENANTS in names and num_tenants > 1)
        }

    async def routes_for(self, request: UpstreamRequest, routes: Sequence[Route]) -> list[Route]:
        """The routes to the account that stores everything the request names. What was created for the tenant is in the
        account that created it; other ids are allowed where the tenant has the account to itself, or `foreign_ids`.

        Raises BadRequestError when no route is left, OverloadedError when the creator of something cannot be looked up.
        """
        tenant, find_creator, left = request.tenant.name, request.find_creator, list(routes)
        if find_creator is None or not self._must_be_recorded(left, tenant):
            return left
        for one in await off_loop(request.work, lambda: named_ids(request.values)):
            if (made_by := await find_creator(one.id)) is None:
                left = [route for route in left if not self._is_guarded(route, tenant)]
            else:
                account = self._account.get(made_by)
                left = [route for route in left if self._account[route.upstream] == account]
            if not left:
                raise _unknown_id(one, made_by)
        return left

    def _must_be_recorded(self, routes: Sequence[Route], tenant: str) -> bool:
        """Whether the ids of a request say which of the routes it may take."""
        accounts = {self._account[route.upstream] for route in routes}
        return len(accounts) > 1 or any(self._is_guarded(route, tenant) for route in routes)

    def _is_guarded(self, route: Route, tenant: str) -> bool:
        shared = self._account[route.upstream] in self._shared
        return shared and not may(self._foreign[route.upstream], tenant)


def _account(settings: UpstreamSettings, key: str | None) -> object:
    headers = frozenset((name.lower(), value.get_secret_value()) for name, value in settings.headers.items())
    return urlsplit(settings.url).netloc, key, headers


def _unknown_id(stored: StoredId, creator: str | None) -> BadRequestError:
    if stored.path == "previous_response_id":
        message = f"Previous response with id '{stored.id[:64]}' not found."
        return BadRequestError(message, param=stored.path, code="previous_response_not_found")
    if creator is not None:
        why = f"it is stored at the upstream {creator}, which does not serve this model, or not all ids of the request"
    else:
        why = (
            "nothing with this id was made for this tenant through this gateway, and others share the upstream's key "
            "([[upstreams]] foreign_ids)"
        )
    return BadRequestError(f"Invalid '{stored.path}': {why}.", param=stored.path, code="invalid_value")
