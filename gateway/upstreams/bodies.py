"""What an upstream is sent: the body as the client wrote it, with another model's name, a caching hint, or a question
for its usage where the settings say so. Safe in any thread, and work for one where the body is large.
"""

from __future__ import annotations

from gateway.errors import BadRequestError, ModelNotFoundError
from gateway.types import UpstreamRequest
from gateway.upstreams.hints import hinted
from gateway.upstreams.json_edit import named_once, replaced, root, without_member
from gateway.upstreams.routes import Route, may
from gateway.upstreams.told_usage import asking_for_usage, tells_no_usage
from gateway.upstreams.upstream import Upstream


def body_for(request: UpstreamRequest, route: Route, upstream: Upstream) -> tuple[bytes, bool, bool]:
    """What it is sent, whether its usage was asked for by us, and whether it has a hint of ours.
    Raises BadRequestError and ModelNotFoundError."""
    if request.only:
        return request.body, False, False
    body, tenant, settings, has_hint = _renamed(request, route), request.tenant.name, upstream.settings, False
    if may(settings.hints, tenant):
        with_hint = hinted(request, body, upstream.seen)
        body, has_hint = with_hint, with_hint is not body
    if may(settings.meter, tenant) and tells_no_usage(request):
        return asking_for_usage(body), True, has_hint
    return body, False, has_hint


def _renamed(request: UpstreamRequest, route: Route) -> bytes:
    """As the client wrote it, but for the model's name where the upstream has another one for it."""
    body = request.body
    if "cache" in request.values:  # what is said of our own cache is for nobody else
        body = without_member(body, root(body), "cache")
    if "{model}" in request.path:
        if any(part in ("", ".", "..") for part in route.model.split("/")):
            raise ModelNotFoundError(request.model)
        return body
    if (named := named_once(body, "model")) is None:
        # Parsers differ in which one they take: ours would decide about another model than the upstream answers with.
        raise BadRequestError("Invalid 'model': it is there more than once.", param="model", code="invalid_value")
    return body if route.model == request.model else replaced(body, named, route.model)
