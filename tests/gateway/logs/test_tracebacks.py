from __future__ import annotations

import json
import logging

import jinja2
import pytest
from pydantic import BaseModel

from gateway.errors import BadRequestError
from gateway.logs.lines import LEFT_OUT, Lines, traceback_of

SECRET = "the prompt of a tenant"


def caught(*errors: BaseException) -> BaseException:
    """The last one, as the context of which the others were raised."""
    first, *rest = errors
    try:
        try:
            raise first
        except BaseException:
            if not rest:
                raise
            return caught(*rest)
    except BaseException as error:
        return error


def foreign() -> list[BaseException]:
    class Asked(BaseModel):
        number: int

    errors: list[BaseException] = []
    for fails in (
        lambda: Asked.model_validate({"number": SECRET}),
        lambda: json.loads(f"{SECRET}"),
        lambda: int(SECRET),
    ):
        try:
            fails()
        except ValueError as error:
            errors.append(error)
    return errors


@pytest.mark.parametrize(
    "error",
    [
        ValueError(SECRET),
        KeyError(SECRET),
        BadRequestError(f"`{SECRET}` is no role.", param="messages[0].role"),
        jinja2.TemplateError(SECRET),
        UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET),
        *foreign(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_may_quote_a_request_is_left_out_in_every_place(error: BaseException) -> None:
    group = BaseExceptionGroup("a group", [error])
    for chain in ([error], [error, OSError("disk")], [OSError("disk"), error], [group], [group, error]):
        text = traceback_of(caught(*chain))
        assert SECRET not in text
        assert type(error).__name__ in text
        assert LEFT_OUT in text
        assert __file__ in text


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        AttributeError("'NoneType' object has no attribute 'x'"),
        RuntimeError("CUDA out of memory"),
        ExceptionGroup("two of them", [RuntimeError("one"), OSError("two")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_speaks_of_code_and_machines_is_traceback_of(error: BaseException) -> None:
    lines = traceback_of(caught(error)).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert f"{type(error).__name__}: {error}" in lines


def test_errors_that_are_each_others_cause_end() -> None:
    one, two = OSError("one"), OSError("two")
    one.__cause__, two.__cause__ = two, one
    assert traceback_of(one).count("Traceback") == 2


def test_an_error_without_a_text_is_traceback_of() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert traceback_of(OddError()).endswith("OddError: (its text cannot be made)")


def test_a_line_of_the_log_has_its_traceback_behind_it() -> None:
    error = caught(ValueError(SECRET))
    record = logging.makeLogRecord({"name": "a", "levelname": "ERROR", "msg": "b"})
    record.exc_info = (ValueError, error, None)
    first, second, *_, last = Lines().format(record).splitlines()
    assert (first[24:], second, last) == ("ERROR a b", "Traceback (most recent call last):", f"ValueError: {LEFT_OUT}")
