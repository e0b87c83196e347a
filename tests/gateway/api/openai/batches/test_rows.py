from __future__ import annotations

import io
import json
from codecs import BOM_UTF8
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.lines import Answered
from gateway.api.openai.batches.rows import MAX_ERRORS, RowLimits, answered, check, unrun
from gateway.queues.batch.base import Checked

CHAT = "/v1/chat/completions"
BODY = {"model": "demo", "messages": [{"role": "user", "content": "Hi\u2028"}]}


def request(custom_id: str, /, **changed: Any) -> dict[str, Any]:
    whole = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": BODY} | changed
    return {name: value for name, value in whole.items() if value is not ...}


def written(*rows: Any) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


LIMITS = RowLimits(lines=100, inputs=100, row_bytes=1000, depth=20)


def checked(data: bytes, endpoint: str = CHAT, **limits: int) -> Checked:
    return check(io.BytesIO(data), endpoint, LIMITS._replace(**limits))


class Watched(io.BytesIO):
    """A file that knows the longest row that was read of it."""

    longest = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        row = super().readline(size)
        self.longest = max(self.longest, len(row))
        return row


def test_a_row_that_is_too_long_is_not_read_to_its_end() -> None:
    file = Watched(written(request("1"), request("2", body=BODY | {"user": "x" * 100_000}), request("3")))
    found = check(file, CHAT, LIMITS)
    assert [(one.code, one.line) for one in found.errors] == [("line_too_long", 2)]
    assert file.longest <= LIMITS.row_bytes + 1


def test_a_file_may_begin_with_the_mark_of_utf_8_and_no_line_has_it() -> None:
    data = BOM_UTF8 + written(request("1"), request("2"))
    found = checked(data)
    assert found.errors == []
    rows = [data[line.offset : line.offset + line.num_bytes] for line in found.lines]
    assert [json.loads(row) for row in rows] == [request("1"), request("2")]
    assert [one.code for one in checked(BOM_UTF8).errors] == ["empty_file"]
    (inside,) = checked(written(request("1")) + data).errors
    assert (inside.code, inside.line) == ("invalid_json_line", 2)


@given(gaps=st.lists(st.sampled_from((b"", b"\n", b" \r\n")), min_size=1, max_size=8), last=st.booleans())
def test_every_line_is_found_where_it_stands(gaps: list[bytes], last: bool) -> None:
    data = b"".join(gap + written(request(f"é{number}")) for number, gap in enumerate(gaps))
    data = data if last else data[:-1]
    found = checked(data)
    assert (found.errors, found.model) == ([], "demo")
    rows = [json.loads(data[line.offset : line.offset + line.num_bytes]) for line in found.lines]
    assert rows == [request(f"é{number}") for number in range(len(gaps))]


@pytest.mark.parametrize(
    ("row", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'{"a": NaN}', "invalid_json_line", None),
        (request("2", body={"model": "demo", "x": json.loads("[" * 30 + "]" * 30)}), "invalid_json_line", None),
        (request("2", custom_id=...), "missing_required_parameter", "custom_id"),
        (request("2", custom_id=7), "invalid_custom_id", "custom_id"),
        (request(""), "invalid_custom_id", "custom_id"),
        (request("x" * 513), "invalid_custom_id", "custom_id"),
        (request("1"), "duplicate_custom_id", "custom_id"),
        (request("2", method="GET"), "invalid_method", "method"),
        (request("2", url="/v1/embeddings"), "mismatched_url", "url"),
        (request("2", body=...), "invalid_request_body", "body"),
        (request("2", body=BODY | {"stream": True}), "unsupported_parameter", "body.stream"),
        (request("2", body={}), "missing_required_parameter", "body.model"),
        (request("2", body=BODY | {"model": "other"}), "mismatched_model", "body.model"),
        (request("2", priority=1), "unknown_parameter", "priority"),
    ],
)
def test_a_line_that_is_wrong_is_told_with_its_number_and_field(row: Any, code: str, param: str | None) -> None:
    found = checked(written(request("1"), b"", row, request("3")))
    ((got, message, field, line),) = found.errors
    assert (got, field, line) == (code, param, 3)
    assert message
    assert len(found.lines) == 2


def test_so_many_lines_and_so_many_errors_are_told() -> None:
    rows = written(*(request(str(number)) for number in range(5)))
    assert checked(rows, lines=5).errors == []
    ((code, _, _, line),) = checked(rows, lines=4).errors
    assert (code, line) == ("too_many_tasks", None)
    assert len(checked(b"x\n" * 1000).errors) == MAX_ERRORS
    ((code, _, _, line),) = checked(b"\n \n").errors
    assert (code, line) == ("empty_file", None)


@pytest.mark.parametrize(
    ("given", "inputs"), [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2], [3]], 3), ([], 1), (None, 1)]
)
def test_texts_to_embed_are_counted_over_all_lines(given: Any, inputs: int) -> None:
    url = "/v1/embeddings"
    rows = written(*(request(str(number), url=url, body={"model": "e", "input": given}) for number in range(3)))
    assert checked(rows, url, inputs=3 * inputs).errors == []
    ((code, _, _, line),) = checked(rows, url, inputs=3 * inputs - 1).errors
    assert (code, line) == ("too_many_inputs", None)


def test_results_are_written_as_the_api_has_them() -> None:
    row = request("a")
    assert json.loads(answered(row, "req_7", Answered(200, b'{"id": "x"}'))) == {
        "id": "batch_req_7",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req_7", "body": {"id": "x"}},
        "error": None,
    }
    for why, code in (("expired", "batch_expired"), ("cancelled", "batch_cancelled"), ("failed", "server_error")):
        told = json.loads(unrun(row, why))  # type: ignore[arg-type]
        assert told.pop("id").startswith("batch_req_")
        assert told["error"].pop("message")
        assert told == {"custom_id": "a", "response": None, "error": {"code": code}}
