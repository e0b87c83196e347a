"""Batches of both APIs through one whole Kvasir, with the real SDKs and the command."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fakes.batch_sdk import CHAT, ENDS, row, rows
from tests.fakes.server import Server

DOCUMENTS = [" ".join(f"{name}{number}" for number in range(150)) for name in ("alpha", "beta")]
LIMIT_S = 60.0


def body(document: str, question: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": document}, {"role": "user", "content": f"Question {question}?"}]
    return {"model": "demo", "messages": messages, "max_tokens": 4, "temperature": 0}


def mixed() -> list[dict[str, Any]]:
    """Five questions to each document, in no order."""
    pairs = [(index, number) for index in range(len(DOCUMENTS)) for number in range(5)]
    found = [row(f"{index}-{number}", body(DOCUMENTS[index], number)) for index, number in pairs]
    random.Random(1).shuffle(found)
    return found


def finished(server: Server, batch_id: str) -> Any:
    client = server.client()
    server.wait_until(lambda: client.batches.retrieve(batch_id).status in ENDS, "the batch has ended", LIMIT_S)
    return client.batches.retrieve(batch_id)


def test_a_batch_answers_as_the_online_lane_does_and_computes_each_document_once(server: Server) -> None:
    client = server.client()
    lines = mixed()
    file = client.files.create(file=rows(*lines), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    batch = finished(server, made.id)
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 10, "completed": 10, "failed": 0}
    answers = {
        one["custom_id"]: one["response"]["body"]
        for one in map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    }
    for line in lines:
        told = answers[line["custom_id"]]["choices"][0]["message"]["content"]
        assert told == client.chat.completions.create(**line["body"]).choices[0].message.content
    prompts = [answer["usage"]["prompt_tokens"] for answer in answers.values()]
    assert batch.usage.input_tokens == sum(prompts)
    computed = batch.usage.input_tokens - batch.usage.input_tokens_details.cached_tokens
    assert computed < 2.5 * max(prompts), "each document is computed once, and each question"
    lanes = {row["lane"]: row for row in server.get("/admin/ledger?group_by=lane")["rows"]}
    assert lanes["batch"]["requests"] == 10


def test_messages_are_answered_in_a_batch(server: Server) -> None:
    batches = server.anthropic().messages.batches
    question: Any = {"role": "user", "content": "Question?"}
    params: Any = {"model": "demo", "max_tokens": 4, "system": DOCUMENTS[0], "messages": [question]}
    made = batches.create(requests=[{"custom_id": f"m-{n}", "params": params} for n in range(4)])
    server.wait_until(lambda: batches.retrieve(made.id).processing_status == "ended", "it has ended", LIMIT_S)
    found = {one.custom_id: one.result for one in batches.results(made.id)}
    assert set(found) == {f"m-{n}" for n in range(4)}
    for result in found.values():
        assert result.type == "succeeded"
        assert result.message.usage.service_tier == "batch"
        assert 1 <= result.message.usage.output_tokens <= 4  # it is sampled, and may end early
    assert batches.delete(made.id).id == made.id


def test_the_command_submits_a_file_and_writes_its_answers(server: Server, tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(rows(*mixed()))
    command = [sys.executable, "-m", "gateway.cli", "batch", "submit", str(file), "--wait", "-o", str(out)]
    done = subprocess.run(
        [*command, "--poll-s", "0.1", "--url", server.url], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert "completed: 10 of 10, 0 failed" in done.stderr
    assert len(out.read_text().splitlines()) == 10
