"""/admin/tenants and /admin/keys: what admins make while the gateway runs, beside the file's tenants, which win, and
what is left of budgets. A key is shown once, in the answer that made it; of it only a hash is kept (issued/).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from aiohttp import web

from gateway.admin.me import budget_json
from gateway.api.dialect import Route
from gateway.api.fields import Parameter, array_of, boolean, choice, integer, invalid, number, read, read_query, text
from gateway.api.record import BODY, CHANGED, RECORD
from gateway.api.replies import reply_json
from gateway.config import MOST, TenantSettings
from gateway.issued.base import IssuedKey, MadeTenant, limits_of, table_of
from gateway.issued.directory import Directory
from gateway.limits.limits import TenantLimits
from gateway.types import owners_of

MAX_MODELS: Final = 100
MAX_CHARS: Final = 256
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LAST_S: Final = 253_402_300_799  # the year 9999
_amount = integer(0, MOST)
_mode = choice("on", "ask", "off")
_MODELS: Final = Parameter(
    "models",
    array_of(text(MAX_CHARS, 1), most=MAX_MODELS),
    "array of names or patterns such as `gpt-*`, default all",
    "The only models that it may use.",
)

_LIMITS: Final[Mapping[str, Parameter]] = {
    one.name: one
    for one in (
        Parameter("requests_per_minute", _amount, "integer", "As in `[[tenants]]`, like the next seven."),
        Parameter("tokens_per_minute", _amount, "integer", "Tokens of prompts and completions; 0 is no limit."),
        Parameter("input_tokens_per_minute", _amount, "integer", "Tokens of prompts; 0 is no limit."),
        Parameter("output_tokens_per_minute", _amount, "integer", "Tokens of completions; 0 is no limit."),
        Parameter("max_in_flight", _amount, "integer", "Requests at a time; 0 is no limit."),
        Parameter("budget", number(0.000001, 1_000_000), "number", "Money that it may spend in a period."),
        Parameter("budget_period", choice("day", "month"), "string", "The period (UTC), default `month`."),
        Parameter("budget_hard", boolean, "boolean", "Whether requests beyond it get 429, default true."),
    )
}
CHANGE: Final[Mapping[str, Parameter]] = {
    **_LIMITS,
    **{
        one.name: one
        for one in (
            Parameter("weight", number(0.01, 100), "number", "Share of engines beside other waiting tenants."),
            Parameter("priority", boolean, "boolean", "Whether its requests may ask to be served first."),
            Parameter("response_cache", _mode, "string", "Mode of the response cache."),
            Parameter("semantic_cache", _mode, "string", "Mode of the semantic cache, where there is one."),
            Parameter("cache_key", choice("separate", "hint"), "string", "What its `prompt_cache_key`s do."),
            Parameter("unknown_fields", choice("ignore", "refuse"), "string", "What becomes of unknown fields."),
            _MODELS,
        )
    },
}
ADD: Final[Mapping[str, Parameter]] = {
    "name": Parameter("name", text(64, 1), "string", "Letters, digits and `._-`."),
    **CHANGE,
}
_EXPIRES: Final = "Unix time in seconds, default never"
CHANGE_KEY: Final[Mapping[str, Parameter]] = {
    **{
        one.name: one
        for one in (
            Parameter("name", text(MAX_CHARS, 1), "string", "What the key is for."),
            Parameter("expires_s", number(0, _LAST_S), _EXPIRES, "From then on it is refused."),
            _MODELS,
        )
    },
    **_LIMITS,
}
ADD_KEY: Final[Mapping[str, Parameter]] = {
    "tenant": Parameter("tenant", text(64, 1), "string", "Name of a tenant, also of one of the file."),
    **CHANGE_KEY,
}
QUERY: Final = {"tenant": Parameter("tenant", text(), "string", "Only keys of this tenant.")}


class TenantPages:
    """Holds what its handlers need. `now` is in seconds since 1970."""

    def __init__(self, directory: Directory, limits: TenantLimits, now: Callable[[], float]) -> None:
        self._directory = directory
        self._limits = limits
        self._now = now

    def routes(self) -> list[Route]:
        tenants, keys = "/admin/tenants", "/admin/keys"
        example = {"name": "south", "requests_per_minute": 600, "models": ["demo"]}
        key_example = {"tenant": "north", "name": "laptop", "requests_per_minute": 60}
        make = "Makes a tenant; it has no key yet."
        change = "Changes a tenant that was made here; null is as if it had never been set."
        remove = "Removes a tenant that was made here, and its keys."
        issue = "Makes a key, which only this answer shows."
        return [
            Route("GET", tenants, self.show, "Tenants of the file, and those that were made here.", key="admin"),
            Route(
                "POST",
                tenants,
                self.make,
                make,
                parameters=ADD,
                required=("name",),
                example=example,
                key="admin",
                changes="tenant made",
            ),
            Route(
                "PATCH",
                f"{tenants}/{{name}}",
                self.change,
                change,
                parameters=CHANGE,
                example={"weight": 2},
                key="admin",
                changes="tenant changed",
            ),
            Route("DELETE", f"{tenants}/{{name}}", self.remove, remove, key="admin", changes="tenant removed"),
            Route(
                "GET",
                keys,
                self.show_keys,
                "Keys that were made here, not the keys themselves.",
                query=QUERY,
                key="admin",
            ),
            Route(
                "POST",
                keys,
                self.make_key,
                issue,
                parameters=ADD_KEY,
                required=("tenant", "name"),
                example=key_example,
                key="admin",
                changes="key made",
            ),
            Route(
                "PATCH",
                f"{keys}/{{id}}",
                self.change_key,
                "Changes a key; null is as if it had never been set.",
                parameters=CHANGE_KEY,
                example={"max_in_flight": 2},
                key="admin",
                changes="key changed",
            ),
            Route(
                "DELETE",
                f"{keys}/{{id}}",
                self.remove_key,
                "Ends a key.",
                key="admin",
                changes="key removed",
            ),
        ]

    async def show(self, http: web.Request) -> web.Response:
        """GET /admin/tenants"""
        fresh, directory = await self._directory.refresh(), self._directory
        issued = directory.issued
        await self._limits.refresh()
        every = [
            self._tenant(one, issued.tenants.get(one.name), in_file=directory.is_of_file(one.name))
            for one in directory.tenants()
        ]
        return reply_json({"tenants": every, "stale": not fresh})

    async def make(self, http: web.Request) -> web.Response:
        """POST /admin/tenants"""
        body = _body(http)
        table = read(body, ADD, ("name",))
        if not _NAME.fullmatch(table["name"]):
            raise invalid("name", "a name has 1 to 64 letters, digits and ._- and begins with a letter or digit")
        self._check_budget(table)
        models = tuple(table.pop("models", ()))
        made = await self._directory.make_tenant(table, models)
        return reply_json(self._tenant(made.settings, made, in_file=False), status=201)

    async def change(self, http: web.Request) -> web.Response:
        """PATCH /admin/tenants/{name}"""
        body = _body(http)
        table = read(body, CHANGE, ())
        self._check_budget(table)
        unset = [name for name, value in body.items() if value is None]
        models = tuple(table.pop("models", ())) if "models" in body else None
        made = await self._directory.change_tenant(http.match_info["name"], table, unset, models)
        return reply_json(self._tenant(made.settings, made, in_file=False))

    async def remove(self, http: web.Request) -> web.Response:
        """DELETE /admin/tenants/{name}"""
        name = http.match_info["name"]
        keys = await self._directory.remove_tenant(name)
        return reply_json({"name": name, "removed": True, "removed_keys": keys})

    async def show_keys(self, http: web.Request) -> web.Response:
        """GET /admin/keys"""
        tenant = read_query(http.query, QUERY).get("tenant")
        fresh = await self._directory.refresh()
        await self._limits.refresh()
        keys = sorted(self._directory.issued.keys.values(), key=lambda key: (-key.created_s, key.id))
        return reply_json(
            {"keys": [self._key(key) for key in keys if tenant in (None, key.tenant)], "stale": not fresh}
        )

    async def make_key(self, http: web.Request) -> web.Response:
        """POST /admin/keys"""
        body = _body(http)
        given = read(body, ADD_KEY, ("tenant", "name"))
        self._check_key(given)
        limits = {name: value for name, value in given.items() if name in _LIMITS}
        models = tuple(given.get("models", ()))
        making = self._directory.make_key(given["tenant"], given["name"], given.get("expires_s"), models, limits)
        secret, key = await making
        http[CHANGED] = {"id": key.id}
        return reply_json({**self._key(key), "key": secret}, {"Cache-Control": "no-store"}, status=201)

    async def change_key(self, http: web.Request) -> web.Response:
        """PATCH /admin/keys/{id}"""
        body = _body(http)
        given = read(body, CHANGE_KEY, ())
        self._check_key(given)
        if "name" in body and "name" not in given:
            raise invalid("name", "a key has one")
        more: dict[str, Any] = {name: given.get(name) for name in ("name", "expires_s") if name in body}
        if "models" in body:
            more["models"] = tuple(given.get("models", ()))
        limits = {name: given.get(name) for name in body if name in _LIMITS}
        key = await self._directory.change_key(http.match_info["id"], more, limits)
        http[CHANGED] = {"tenant": key.tenant}
        return reply_json(self._key(key))

    async def remove_key(self, http: web.Request) -> web.Response:
        """DELETE /admin/keys/{id}"""
        key = await self._directory.remove_key(http.match_info["id"])
        http[CHANGED] = {"tenant": key.tenant}
        return reply_json({"id": key.id, "removed": True})

    def _key(self, key: IssuedKey) -> dict[str, Any]:
        return {
            "id": key.id,
            "tenant": key.tenant,
            "name": key.name,
            "created_s": round(key.created_s, 3),
            "expires_s": key.expires_s,
            "expired": key.expires_s is not None and self._now() >= key.expires_s,
            "models": list(key.models),
            **limits_of(key),
            **self._budget(owners_of(key.tenant, key.id)[-1]),
        }

    def _tenant(self, settings: TenantSettings, made: MadeTenant | None, *, in_file: bool) -> dict[str, Any]:
        """What is not set is as in the sections of all tenants."""
        models = made.models if made is not None and not in_file else ()
        table = table_of(MadeTenant(settings))
        where = {"source": "file" if in_file else "admin", "models": list(models)}
        return {**table, **where, **self._budget(settings.name)}

    def _budget(self, owner: str) -> dict[str, Any]:
        """What is spent, where there is a budget."""
        state = self._limits.budgets.state(owner) if self._limits.budgets else None
        return {} if state is None else {"budget_state": budget_json(state)}

    def _check_key(self, given: Mapping[str, Any]) -> None:
        if (expires_s := given.get("expires_s")) is not None and expires_s <= self._now():
            raise invalid("expires_s", "it is in the past")
        self._check_budget(given)

    def _check_budget(self, given: Mapping[str, Any]) -> None:
        several = self._limits.budgets.several_currencies if self._limits.budgets else ""
        if "budget" in given and several:
            raise invalid("budget", f"it cannot add up prices in {several}; [[prices]] need one currency")


def _body(http: web.Request) -> dict[str, Any]:
    """Of a change, in which nothing unknown is passed over: a limit with a typo would be none."""
    http[RECORD].ignored.refuse = True
    return http[BODY]
