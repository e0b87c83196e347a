"""What a whole Kvasir keeps: readable by its user alone, whatever the umask, and without a key in Redis, on disk or in
the log."""

from __future__ import annotations

import hashlib
import json
import stat
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import redis

from tests.fakes.batch_sdk import CHAT, ENDS, row, rows
from tests.fakes.server import Server

TENANT, ADMIN, WRONG = "tenant-key-5f1c", "admin-key-9a3e", "wrong-key-77d0"
UPSTREAM, HEADER, ENGINE = "upstream-key-41b8", "upstream-header-0c6d", "engine-secret-e2f9"
CONFIG = f"""
[auth]
admin_keys = ["{ADMIN}"]
[engine]
secret = "{ENGINE}"
dtype = "float32"
kv_cache_bytes = {64 << 20}
[response_cache]
upstreams = "on"
[[tenants]]
name = "north"
keys = ["{TENANT}"]
[[upstreams]]
name = "hosted"
dialect = "openai"
url = "http://127.0.0.1:9/v1"
models = ["hosted-*"]
key = "{UPSTREAM}"
headers = {{ x-team = "{HEADER}" }}
"""
OPEN_UMASK = ("/bin/sh", "-c", 'umask 0000; exec "$@"', "sh", sys.executable, "-m", "gateway.cli")
QUESTION = "Who keeps the station? " * 12


def post(server: Server, path: str, body: dict[str, Any], key: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "Origin": server.url}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def use(server: Server) -> str:
    """Everything that keeps something. Returns a key that was made meanwhile."""
    client = server.client(TENANT)
    question: Any = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
    for _ in range(2):
        client.chat.completions.create(**question, temperature=0)
    client.responses.create(model="demo", input=QUESTION, max_output_tokens=16)
    server.anthropic(TENANT).messages.create(**question)
    server.get(f"/v1beta/models?key={TENANT}")
    client.files.create(file=("notes.txt", b"Notes."), purpose="user_data")
    lines = client.files.create(file=rows(row("one", question)), purpose="batch")
    made = client.batches.create(input_file_id=lines.id, endpoint=CHAT, completion_window="24h")
    server.wait_until(lambda: client.batches.retrieve(made.id).status in ENDS, "the batch has ended", 60)
    issued: str = post(server, "/admin/keys", {"tenant": "north", "name": "laptop"}, ADMIN)["key"]
    server.client(issued).chat.completions.create(**question)
    post(server, "/admin/session", {"key": ADMIN}, ADMIN)
    with pytest.raises(openai.APIStatusError):
        client.chat.completions.create(**{**question, "model": "hosted-model"})
    with pytest.raises(openai.AuthenticationError):
        server.client(WRONG).models.list()
    with pytest.raises(urllib.error.HTTPError):
        server.get(f"/v1beta/models?key={WRONG}")
    return issued


def stored(url: str) -> Iterator[bytes]:
    """Every key and value of a Redis."""
    with redis.Redis(unix_socket_path=url) as client:
        for key in client.scan_iter(count=1000):
            yield key
            match client.type(key):
                case b"string":
                    yield client.get(key) or b""
                case b"hash":
                    yield from (part for pair in client.hgetall(key).items() for part in pair)
                case b"set":
                    yield from client.smembers(key)
                case b"zset":
                    yield from (member for member, _ in client.zrange(key, 0, -1, withscores=True))
                case b"list":
                    yield from client.lrange(key, 0, -1)
                case b"stream":
                    yield from (part for _, entry in client.xrange(key) for pair in entry.items() for part in pair)
                case other:
                    raise AssertionError(f"{key!r}: a type that this test does not read: {other!r}")


@pytest.mark.slow
def test_what_is_kept_is_its_users_alone_and_holds_no_key(tmp_path: Path) -> None:
    data, config = tmp_path / "data", tmp_path / "kvasir.toml"
    config.write_text(CONFIG, encoding="utf-8")
    flags = ("--config", str(config), "--response-cache-mode", "on")
    with Server(data, *flags, program=OPEN_UMASK) as server:
        issued = use(server)
        server.wait_until(
            lambda: server.get("/admin/stats", ADMIN)["engines"][0]["tiers"]["disk"]["blocks"] > 0, "disk"
        )
        in_redis = b"\n".join(stored(str(data / "redis" / "redis.sock")))
        modes = {path: path.lstat().st_mode for path in (data, *data.rglob("*"))}
        files = {path: path.read_bytes() for path, mode in modes.items() if stat.S_ISREG(mode)}
    log = "\n".join(server.lines)

    kinds = {path.relative_to(data).parts[0] for path in files}
    assert kinds >= {"audit.jsonl", "batches", "blocks", "files", "redis"}
    assert not {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077}
    assert {stat.S_IMODE(mode) for mode in modes.values() if stat.S_ISDIR(mode)} == {0o700}
    assert {stat.S_IMODE(modes[path]) for path in files} == {0o600}

    for secret in (TENANT, ADMIN, WRONG, UPSTREAM, HEADER, ENGINE, issued):
        assert secret.encode() not in in_redis
        assert secret not in log
        assert not [path for path, content in files.items() if secret.encode() in content]
    assert hashlib.sha256(issued.encode()).hexdigest().encode() in in_redis
    assert QUESTION.encode() in in_redis, "texts are there, so this would find a key"
    assert QUESTION.strip() not in log
