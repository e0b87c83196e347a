from __future__ import annotations

import io
import json
from typing import Any

import pytest

from gateway.api.anthropic.batches.rows import ROWS
from gateway.api.lines import Answered
from gateway.queues.batch.base import Checked, Job, Line

ROW: dict[str, Any] = {"custom_id": "a", "params": {"model": "demo"}}
JOB = Job("1", "t", "anthropic", "/v1/messages", 0.0, 1.0, metadata={"version": "2023-06-01"})


def test_all_rows_are_lines() -> None:
    assert ROWS.check(JOB, io.BytesIO(b"{}\n{ }\n")) == Checked([Line(0, 3), Line(3, 4)], [])


def test_a_row_asks_as_in_the_version_that_its_batch_was_made_with() -> None:
    assert ROWS.request(JOB, ROW) == ("/v1/messages 2023-06-01", {"model": "demo"})


def test_an_answer_is_a_message_and_an_error_the_whole_of_it() -> None:
    told = json.loads(ROWS.answered(ROW, "req_1", Answered(200, b'{"id":"msg_1"}')))
    assert told == {"custom_id": "a", "result": {"type": "succeeded", "message": {"id": "msg_1"}}}
    told = json.loads(ROWS.answered(ROW, "req_1", Answered(400, b'{"type":"error"}')))
    assert told == {"custom_id": "a", "result": {"type": "errored", "error": {"type": "error"}}}


@pytest.mark.parametrize(("why", "result"), [("cancelled", {"type": "canceled"}), ("expired", {"type": "expired"})])
def test_what_never_ran_says_why(why: Any, result: Any) -> None:
    assert json.loads(ROWS.unrun(ROW, why)) == {"custom_id": "a", "result": result}


def test_a_fault_of_ours_is_an_error() -> None:
    result = json.loads(ROWS.unrun(ROW, "failed"))["result"]
    assert (result["type"], result["error"]["error"]["type"]) == ("errored", "api_error")
