"""Which remembered answers an operator means, as parameters. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gateway.api.fields import Check, Parameter, in_url, invalid, number, takes, text
from gateway.responses.listing import Chosen

LONGEST_S: Final = 1e9
_ID: Final = re.compile(r"[0-9a-f]{1,32}", re.ASCII)


@takes({"type": "string", "pattern": "^[0-9a-f]{1,32}$"})
def _prefix(value: Any, path: str) -> str:
    if not _ID.fullmatch(text()(value, path)):
        raise invalid(path, "an id has 32 characters, 0-9 and a-f; its beginning will do")
    return str(value)


_age = number(0, LONGEST_S)


def _choices(age: Check[float]) -> tuple[Parameter, ...]:
    return (
        Parameter("tenant", text(), "string", "Only this tenant's own."),
        Parameter("namespace", text(), "string", "Only those that this namespace shares."),
        Parameter("model", text(), "string", "Only of this model."),
        Parameter("id", _prefix, "1 to 32 characters, `0-9a-f`", "Only this one, or those whose ids begin so."),
        Parameter("older_than_s", age, "number", "Only those that were made so long ago, or longer."),
        Parameter("younger_than_s", age, "number", "Only those that were made so long ago, or later."),
    )


IN_URL: Final = {one.name: one for one in _choices(in_url(_age))}
IN_BODY: Final = {one.name: one for one in _choices(_age)}


def chosen_by(values: Mapping[str, Any]) -> Chosen:
    """Of checked parameters. Raises BadRequestError for a tenant and a namespace together."""
    tenant, namespace = values.get("tenant"), values.get("namespace")
    if tenant is not None and namespace is not None:
        raise invalid("namespace", "an answer is a tenant's own or a namespace's, and not both")
    owner = f"tenant:{tenant}" if tenant is not None else None
    return Chosen(
        owner=owner if namespace is None else f"namespace:{namespace}",
        model=values.get("model"),
        id=values.get("id", ""),
        older_than_s=values.get("older_than_s", 0.0),
        younger_than_s=values.get("younger_than_s"),
    )
