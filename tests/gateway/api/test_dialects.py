"""What is true of every dialect and every route, whoever wrote it."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from gateway import errors
from gateway.api.dialect import Dialect
from gateway.api.fields import Check, Parameter, boolean, in_url, integer, number, read_query
from gateway.api.middleware import DIALECTS
from gateway.errors import BadRequestError, KvasirError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KvasirError)]


def an_error(kind: type[KvasirError], message: str, **known: Any) -> KvasirError:
    error = kind.__new__(kind)
    KvasirError.__init__(error, message, **known)
    return error


ERRORS = [
    *(an_error(kind, "no") for kind in KINDS),
    *(an_error(kind, "no", param="messages[0].role", code="invalid_value", retry_after_s=2.5) for kind in KINDS),
    BadRequestError("\ud83d is half a character"),
]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_every_error_is_in_the_shape_that_the_dialect_declares(dialect: Dialect) -> None:
    shape = jsonschema.Draft202012Validator(dialect.error_schema)
    for error in ERRORS:
        shape.validate(dialect.error_json(error, "req_1"))
        assert 400 <= dialect.status(error) < 600
    assert not shape.is_valid({})
    assert not shape.is_valid({"error": "wrong"})


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_the_docs_show_where_a_dialect_puts_its_key(dialect: Dialect) -> None:
    assert any("KEY" in value for value in dialect.asking_headers.values())


@pytest.mark.parametrize(
    ("check", "written", "value"),
    [
        (integer(0, 9), "7", 7),
        (integer(-9, 9), "-7", -7),
        (number(0, 1), "0.5", 0.5),
        (number(0, 1), "6.284704357379586e-279", 6.284704357379586e-279),
        (number(0, 1), "1E-2", 0.01),
        (boolean, "true", True),
    ],
    ids=lambda given: given.schema["type"] if isinstance(given, Check) else str(given),
)
def test_a_parameter_of_a_url_is_what_is_written(check: Any, written: str, value: Any) -> None:
    table = {"a": Parameter("a", in_url(check), "-", "-")}
    assert read_query({"a": written, "key": "not ours"}, table) == {"a": value}
    assert read_query({}, table) == {}
    for wrong in ("", "x", "1e3", "1e999", "[1]", "99999999999999999999999", "٣"):
        with pytest.raises(BadRequestError, match="'a'"):
            read_query({"a": wrong}, table)
