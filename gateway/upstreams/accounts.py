"""Which upstreams keep things in one place, and who may name what is kept there.

An upstream keeps things by its key: who asks with the same key can name them. An *account* is all [[upstreams]] at one
host with one key and the same headers; it is shared where more than one tenant may ask there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from gateway.config import EVERYBODY, UpstreamSettings
from gateway.errors import BadRequestError
from gateway.tasks import off_loop
from gateway.types import UpstreamRequest
from gateway.upstreams.routes import Route, may
from gateway.upstreams.stored_ids import StoredId, named_ids


class Accounts:
    """Of all upstreams. `num_tenants` are configured."""

    def __init__(self, settings: Sequence[UpstreamSettings], keys: Mapping[str, str], num_tenants: int) -> None:
        self._account = {one.name: _account(one, keys.get(one.name)) for one in settings}
        self._foreign = {one.name: one.foreign_ids for one in settings}
        asking: dict[object, set[str]] = {}
        for one in settings:
            asking.setdefault(self._account[one.name], set()).update(one.tenants)
        self._shared = {
            account for account, names in asking.items() if len(names) > 1 or (EVERYBODY in names and num_tenants > 1)
        }

    async def holding(self, request: UpstreamRequest, routes: Sequence[Route]) -> list[Route]:
        """The routes to where everything is kept that the request names. What was made for the tenant is where it was
        made; anything else goes on where the tenant has the account to itself, or may name what others made.

        Raises BadRequestError when no route is left, OverloadedError when it cannot be known who made something.
        """
        tenant, maker, left = request.tenant.name, request.maker, list(routes)
        if maker is None or not self._have_to_be_known(left, tenant):
            return left
        for one in await off_loop(request.work, lambda: named_ids(request.values)):
            if (made_by := await maker(one.id)) is None:
                left = [route for route in left if not self._is_guarded(route, tenant)]
            else:
                account = self._account.get(made_by)
                left = [route for route in left if self._account[route.upstream] == account]
            if not left:
                raise _not_known(one, made_by)
        return left

    def _have_to_be_known(self, routes: Sequence[Route], tenant: str) -> bool:
        """Whether the ids of a request say which of the routes it may take."""
        accounts = {self._account[route.upstream] for route in routes}
        return len(accounts) > 1 or any(self._is_guarded(route, tenant) for route in routes)

    def _is_guarded(self, route: Route, tenant: str) -> bool:
        shared = self._account[route.upstream] in self._shared
        return shared and not may(self._foreign[route.upstream], tenant)


def _account(settings: UpstreamSettings, key: str | None) -> object:
    headers = frozenset((name.lower(), value.get_secret_value()) for name, value in settings.headers.items())
    return urlsplit(settings.url).netloc, key, headers


def _not_known(stored: StoredId, maker: str | None) -> BadRequestError:
    if stored.path == "previous_response_id":
        message = f"Previous response with id '{stored.id[:64]}' not found."
        return BadRequestError(message, param=stored.path, code="previous_response_not_found")
    if maker is not None:
        why = (
            f"it is kept by the upstream {maker}, which is not asked for this model, or not for all ids of the request"
        )
    else:
        why = (
            "nothing with this id was made for this tenant through this gateway, and others share the upstream's key "
            "([[upstreams]] foreign_ids)"
        )
    return BadRequestError(f"Invalid '{stored.path}': {why}.", param=stored.path, code="invalid_value")
