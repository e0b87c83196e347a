"""The night's clients: three tenants that say the same conversations in all dialects to both gateways, upload files and
run batches. No client tries again: what it was told is what is judged, here and then in checks.py."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from tokenizers import Tokenizer

from tests.chaos.night import dialects
from tests.chaos.night.conversations import Turn
from tests.chaos.night.dialects import DIALECTS, HOSTED, Answer, FailedError, Question, WrongError
from tests.chaos.night.hosted import COMPLETION_TOKENS, PROMPT_TOKENS
from tests.chaos.night.site import ROOT, TENANTS, Place

DEADLINE_S: Final = 60.0
SILENCE_S: Final = 30.0
"""Streams are pinged every 10 s."""
EPOCH_S: Final = 60.0
"""After which conversations begin anew, under other names: first requests go on until the end."""
CLIENTS: Final = 2
"""Of each tenant."""
PAUSE_S: Final = 0.3
LINES: Final = 12
LINE_TOKENS: Final = 4
BATCH_LIMIT_S: Final = 240.0
LEAVE: Final = 0.05
"""Of all streams whose client hangs up after the first bytes."""
SMALL: Final = ("north", "south")
"""Tenants that send small requests besides, which cost nearly nothing: what a gateway remembers of its latest requests
and conversations is full within minutes, and what its memory grows by then is a leak."""
SMALL_PAUSE_S: Final = 0.06
TAG: Final = re.compile(r"<<((?:north|south|east) [0-9a-f]+)>>")
NUMBER: Final = re.compile(r"number (\d+) for")
REUSED: Final = ("exact", "shared", "semantic")


@dataclass
class Sent:
    """One request, and what became of it.

    outcome  answered, refused, failed (an error after the first byte), lost (the connection was), left (by the client)
    most     tokens of prompt and answer that it may have used, where nobody said
    """

    tenant: str
    gateway: int
    kind: str
    begun_s: float
    most: tuple[int, int] = (0, 0)
    ended_s: float = 0.0
    outcome: str = ""
    status: int = 0
    used: tuple[int, int] = (0, 0)
    reused: bool = False
    why: str = ""


@dataclass
class Said:
    """What one tenant sent: digests of requests, and how many of each conversation."""

    requests: set[bytes] = field(default_factory=set)
    conversations: Counter[str] = field(default_factory=Counter)
    latest: deque[tuple[Question, str]] = field(default_factory=lambda: deque(maxlen=20))


@dataclass
class Batch:
    """One job of a tenant; `rows` are its results by id."""

    tenant: str
    id: str
    made_s: float
    wanted: Counter[str]
    dialect: str
    lost_s: float = 0.0  # when it was known to be lost
    undone_s: float = 0.0  # when its end was known to be undone
    rows: Counter[str] = field(default_factory=Counter)
    used: list[int] = field(default_factory=lambda: [0, 0])
    files: set[str] = field(default_factory=set)  # what went in and came out, which its client deletes at last
    state: str = ""


class Load:
    """`upstream_is_hurt` says whether the upstream was wrong since a time."""

    def __init__(
        self,
        place: Place,
        conversations: list[list[Turn]],
        dice: random.Random,
        upstream_is_hurt: Callable[[float], bool],
    ) -> None:
        self._place, self._conversations, self._dice = place, conversations, dice
        self._upstream_is_hurt = upstream_is_hurt
        self._tokenizer = Tokenizer.from_file(str(ROOT / "engine/demo/model/tokenizer.json"))
        self._said = {tenant: Said() for tenant in TENANTS}
        self._answers: dict[bytes, str] = {}
        self._serials: dict[str, str] = {}
        self.begun_s = time.monotonic()
        self.sent: list[Sent] = []
        self.batches: list[Batch] = []
        self.files: Counter[str] = Counter()
        self.uploaded: set[str] = set()
        self.deleted: set[str] = set()
        self.violations: list[tuple[float, str, str]] = []
        self._number = 0
        self.first_asked = 0
        self.compared = 0
        self.over = asyncio.Event()
        self.is_calm = False

    def violate(self, what: str, why: str) -> None:
        self.violations.append((time.monotonic() - self.begun_s, what, why[:1500]))

    async def run(self) -> None:
        """Until `over` is set; then what is open ends, batches too. May be called again."""
        limits = aiohttp.ClientTimeout(total=DEADLINE_S, sock_read=SILENCE_S)
        async with aiohttp.ClientSession(timeout=limits) as session, asyncio.TaskGroup() as group:
            for tenant in TENANTS:
                for _ in range(CLIENTS):
                    group.create_task(self._talk(session, tenant))
                group.create_task(self._batches(session, tenant))
                group.create_task(self._files(session, tenant))
            for tenant in SMALL:
                group.create_task(self._say_small(limits, tenant))

    def _url(self, gateway: int) -> str:
        return f"http://127.0.0.1:{self._place.gateways[gateway].port}"

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), seconds)

    # -- conversations ------------------------------------------------------------------------------------------------

    async def _talk(self, session: aiohttp.ClientSession, tenant: str) -> None:
        while not self.over.is_set():
            epoch = int((time.monotonic() - self.begun_s) / EPOCH_S)
            number = self._dice.randrange(len(self._conversations))
            turns, name = self._conversations[number], f"{number}-{epoch}"
            system = f"No. {name}. This is conversation {name}. Answer in a few words."
            dialect, hosted = self._dice.choice(DIALECTS), self._dice.random() < 0.25
            hosted = hosted and dialect in HOSTED
            for end in range(1, len(turns) + 1, 2):
                said = turns[:end]
                tagged = hosted or self._dice.random() < 0.3
                if tagged:  # whose prompt this is; others are the same of all tenants
                    tag = f"<<{tenant} {self._dice.getrandbits(40):x}>>"
                    said = [*said[:-1], ("user", f"{said[-1][1]} {tag}")]
                question = Question(
                    dialect,
                    HOSTED[dialect] if hosted else "demo",
                    system,
                    tuple(said),
                    16 if dialect == "responses" else self._dice.choice((3, 6, 12)),
                    self._dice.random() < 0.5,
                )
                latest = self._said[tenant].latest
                if latest and self._dice.random() < 0.15:  # the same again
                    question, again = self._dice.choice(latest)
                    await self._ask(session, tenant, question, again)
                else:
                    await self._ask(session, tenant, question, name)
                    latest.append((question, name))
                await self._pause(self._dice.uniform(0, 2 * PAUSE_S))
                if self.over.is_set():
                    return

    async def _say_small(self, limits: aiohttp.ClientTimeout, tenant: str) -> None:
        """Each on a connection of its own, so that all workers get them."""
        async with aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(force_close=True)) as session:
            while not self.over.is_set():
                name = f"{self._dice.getrandbits(40):x}"
                said = (("user", f"Say something about {name}. <<{tenant} {name}>>"),)
                if self._dice.random() < 0.4:
                    question = Question("completions", "demo", f"{name} is small.", said, 1, streamed=False)
                else:
                    dialect, streamed = self._dice.choice(sorted(HOSTED)), self._dice.random() < 0.5
                    question = Question(dialect, HOSTED[dialect], f"{name} is small.", said, 12, streamed)
                await self._ask(session, tenant, question, name)
                await self._pause(SMALL_PAUSE_S)

    async def _ask(self, session: aiohttp.ClientSession, tenant: str, question: Question, name: str) -> None:
        said, gateway = self._said[tenant], self._dice.randrange(2)
        hosted = question.model != "demo"
        prompt = question.rendered()
        # Streams and others of one question may share an answer, whichever of our own APIs it came by.
        digest = hashlib.sha256(f"{question.model}\0{prompt}\0{question.max_tokens}".encode()).digest()
        whose = f"{question.model} {name}"
        is_new = digest not in said.requests
        said.conversations[whose] += 1
        said.requests.add(digest)
        counted = PROMPT_TOKENS if hosted else len(self._tokenizer.encode(prompt, add_special_tokens=False).ids)
        most = (counted, COMPLETION_TOKENS if hosted else question.max_tokens)
        kind = f"{question.dialect}{' stream' if question.streamed else ''}{' hosted' if hosted else ''}"
        sent = Sent(tenant, gateway, kind, time.monotonic(), most)
        self.sent.append(sent)
        leaves = question.streamed and not self.is_calm and self._dice.random() < LEAVE
        body = b""
        try:
            async with session.post(
                self._url(gateway) + question.path(),
                json=question.body(),
                headers=dialects.headers(TENANTS[tenant], question.dialect),
            ) as answer:
                sent.status = answer.status
                outcome = answer.headers.get("x-kvasir-cache", "")
                async for piece in answer.content.iter_any():
                    body += piece
                    if leaves:
                        sent.outcome = "left"
                        answer.close()
                        return
                if answer.status != 200:
                    sent.outcome = "refused"
                    if why := dialects.refused(question.dialect, answer.status, answer.headers, body):
                        if hosted and self._upstream_is_hurt(sent.begun_s):
                            sent.outcome, sent.why = "refused by the upstream", why
                        else:
                            self.violate("honest", f"{kind} at gateway {gateway}: {why}")
                    return
                sent.reused = outcome in REUSED
            self._judge(question, dialects.read(question, body), sent, outcome, whose, is_new)
        except FailedError as failed:
            sent.outcome, sent.why = "failed", str(failed)
        except WrongError as wrong:
            sent.outcome, sent.why = "wrong bytes passed on", str(wrong)
            if not (hosted and self._upstream_is_hurt(sent.begun_s)):
                self.violate("honest", f"{kind} at gateway {gateway}: {wrong}")
        except TimeoutError:
            sent.outcome, sent.why = "silent", f"{time.monotonic() - sent.begun_s:.1f} s, then nothing: {body[-200:]!r}"
        except aiohttp.ClientError as error:
            # An answer that the upstream cut is cut for the client, too: it does not look whole.
            cut = hosted and self._upstream_is_hurt(sent.begun_s) and isinstance(error, aiohttp.ClientPayloadError)
            sent.outcome, sent.why = "cut by the upstream" if cut else "lost", f"{type(error).__name__}: {error}"
        finally:
            sent.ended_s = time.monotonic()

    def _judge(self, question: Question, answer: Answer, sent: Sent, outcome: str, whose: str, is_new: bool) -> None:
        """A whole answer: whose it is, and what it used."""
        sent.outcome, sent.used = "answered", (answer.prompt, answer.completion)
        where = f"{sent.kind} of {sent.tenant} at gateway {sent.gateway}"
        hosted = question.model != "demo"
        if answer.prompt != sent.most[0] or answer.completion > sent.most[1]:
            self.violate("tokens", f"{where}: {answer.prompt}+{answer.completion} instead of {sent.most}")
        if sent.reused and is_new:
            self.violate("apart", f"{where}: {outcome} for a request that this tenant never sent")
        # Another one of this conversation may have begun, and been computed, since this one was sent.
        is_first = self._said[sent.tenant].conversations[whose] == 1
        self.first_asked += is_first
        if is_first and answer.cached and not hosted:
            self.violate("apart", f"{where}: {answer.cached} cached tokens of what this tenant never said")
        if hosted:
            asked = {tag for _, text in question.turns for tag in TAG.findall(text)}
            if (told := set(TAG.findall(answer.text))) != asked:
                self.violate("apart", f"{where}: an answer to {told} instead of {asked}")
            serial = NUMBER.search(answer.text)
            if serial and self._serials.setdefault(serial[1], sent.tenant) != sent.tenant:
                self.violate("apart", f"{where}: answer {serial[1]} of {self._serials[serial[1]]}")
            return
        # The same question has the same answer: warm or cold, at either engine, by whichever is left.
        key = hashlib.sha256(f"{question.rendered()}\0{question.max_tokens}".encode()).digest()
        before = self._answers.setdefault(key, answer.text)
        self.compared += before is not answer.text
        if before != answer.text:
            self.violate("same", f"{where} ({outcome}): {answer.text!r} instead of {before!r}")

    # -- batches ------------------------------------------------------------------------------------------------------

    async def _batches(self, session: aiohttp.ClientSession, tenant: str) -> None:
        while not self.over.is_set():
            self._number = number = self._number + 1
            dialect = ("chat", "messages")[number % 2]
            if (batch := await self._begin(session, tenant, dialect, number)) is not None:
                self.batches.append(batch)
                await self._finish(session, batch)
            await self._pause(2.0)

    def _row(self, dialect: str, number: int, line: int) -> tuple[str, Question]:
        turns = self._conversations[(number + line // 3) % len(self._conversations)][:1]
        name = f"b{number}-{line}"
        said = (("user", turns[-1][1] + name),)
        return name, Question(dialect, "demo", f"Batch {number}.", said, LINE_TOKENS, False)

    async def _begin(self, session: aiohttp.ClientSession, tenant: str, dialect: str, number: int) -> Batch | None:
        made_s, rows = time.monotonic(), [self._row(dialect, number, line) for line in range(LINES)]
        wanted = Counter(name for name, _ in rows)
        if dialect == "messages":
            requests = [{"custom_id": name, "params": question.body()} for name, question in rows]
            path, body = "/v1/messages/batches", {"requests": requests}
        else:
            url = "/v1/chat/completions"
            text = "".join(
                json.dumps({"custom_id": name, "method": "POST", "url": url, "body": question.body()}) + "\n"
                for name, question in rows
            )
            stored = await self._upload(session, tenant, text.encode(), "batch")
            if stored is None:
                return None
            path, body = "/v1/batches", {"input_file_id": stored, "endpoint": url, "completion_window": "24h"}
        found = await self._call(session, tenant, "POST", path, dialect, json=body)
        if found is None:
            return None
        files = {body["input_file_id"]} if "input_file_id" in body else set()
        return Batch(tenant, found["id"], made_s, wanted, dialect, files=files)

    async def _finish(self, session: aiohttp.ClientSession, batch: Batch) -> None:
        """Waits for its end, and reads its results."""
        path = f"/v1/{'messages/' if batch.dialect == 'messages' else ''}batches/{batch.id}"
        until_s = time.monotonic() + BATCH_LIMIT_S
        while time.monotonic() < until_s:
            await asyncio.sleep(1.0)
            found = await self._call(session, batch.tenant, "GET", path, batch.dialect, missing_since_s=batch.made_s)
            if found is not None:
                batch.state = found.get("status") or found.get("processing_status") or "lost with a fail-over"
                if found.get("missing"):
                    batch.lost_s = time.monotonic()
                    return
                has_ended = batch.state in ("completed", "ended", "failed", "expired", "cancelled")
                if has_ended and await self._results(session, batch, found, path):
                    await self._delete(session, batch.tenant, batch.files)
                    return
        batch.state = f"stuck as {batch.state}"

    async def _results(self, session: aiohttp.ClientSession, batch: Batch, found: Any, path: str) -> bool:
        """Whether all of it could be read."""
        if batch.dialect == "messages":
            paths = [f"{path}/results"]
        else:
            ids = (found.get("output_file_id"), found.get("error_file_id"))
            self.uploaded |= {one for one in ids if one}
            batch.files |= {one for one in ids if one}
            paths = [f"/v1/files/{file_id}/content" for file_id in ids if file_id]
        since_s = batch.made_s if batch.dialect == "messages" else None  # files are not lost with a record
        texts = [await self._call(session, batch.tenant, "GET", one, batch.dialect, since_s) for one in paths]
        if None in texts:
            return False
        if {"missing": True} in texts:
            batch.state, batch.lost_s = "lost with a fail-over", time.monotonic()
            return True
        if {"undone": True} in texts:
            batch.undone_s = time.monotonic()
            return False
        for text in texts:
            for line in bytes(text).splitlines():
                row = json.loads(line)
                batch.rows[row["custom_id"]] += 1
                if batch.dialect == "messages":
                    answer = row["result"].get("message")
                else:
                    answer = (row.get("response") or {}).get("body")
                usage = (answer or {}).get("usage")
                if usage is None:
                    batch.state += f", {row['custom_id']}: {str(row)[:200]}"
                    continue
                question = Question(batch.dialect, "demo", "", (("user", ""),), LINE_TOKENS, False)
                used = dialects.read(question, json.dumps(answer).encode())
                batch.used[0] += used.prompt
                batch.used[1] += used.completion
        return True

    # -- files, and calls that are no prompts -------------------------------------------------------------------------

    async def _files(self, session: aiohttp.ClientSession, tenant: str) -> None:
        """What was stored comes back as it was, until it is deleted."""
        while not self.over.is_set():
            data = self._dice.randbytes(self._dice.randrange(1000, 60_000))
            file_id = await self._upload(session, tenant, data, "user_data")
            if file_id is not None:
                read = await self._call(session, tenant, "GET", f"/v1/files/{file_id}/content", "chat")
                if read is not None and read != data:
                    self.violate("files", f"{len(read)} bytes of {len(data)} of {file_id} came back, or others")
                other = self._dice.choice([one for one in TENANTS if one != tenant])
                path = f"/v1/files/{file_id}/content"
                stolen = await self._call(session, other, "GET", path, "chat", missing_since_s=0)
                if stolen is not None and not isinstance(stolen, dict):
                    self.violate("apart", f"{other} reads a file of {tenant}")
                self.files["read" if read is not None else "not read"] += 1
                await self._delete(session, tenant, {file_id})
            else:
                self.files["refused"] += 1
            await self._pause(3.0)

    async def _delete(self, session: aiohttp.ClientSession, tenant: str, file_ids: set[str]) -> None:
        for file_id in sorted(file_ids):
            path = f"/v1/files/{file_id}"
            if await self._call(session, tenant, "DELETE", path, "chat", missing_since_s=0) is not None:
                self.deleted.add(file_id)

    async def _upload(self, session: aiohttp.ClientSession, tenant: str, data: bytes, purpose: str) -> str | None:
        form = aiohttp.FormData()
        form.add_field("purpose", purpose)
        form.add_field("file", data, filename="in.jsonl", content_type="application/octet-stream")
        found = await self._call(session, tenant, "POST", "/v1/files", "chat", data=form)
        if found is None:
            return None
        self.uploaded.add(found["id"])
        return str(found["id"])

    async def _call(
        self,
        session: aiohttp.ClientSession,
        tenant: str,
        method: str,
        path: str,
        dialect: str,
        missing_since_s: float | None = None,
        **what: Any,
    ) -> Any:
        """JSON or bytes; None of what was refused. With `missing_since_s` a 404 is {"missing": True}, and results
        whose end a fail-over has undone are {"undone": True}, for checks.py."""
        gateway = self._dice.randrange(2)
        sent = Sent(tenant, gateway, f"{method} {path.split('/')[2]}", time.monotonic())
        self.sent.append(sent)
        named = dialects.headers(TENANTS[tenant], dialect)
        try:
            async with session.request(method, self._url(gateway) + path, headers=named, **what) as answer:
                body, sent.status = await answer.read(), answer.status
                if answer.status == 404 and missing_since_s is not None:
                    sent.outcome = "answered"
                    return {"missing": True}
                if answer.status == 400 and missing_since_s is not None and b"has no results yet" in body:
                    sent.outcome = "answered"
                    return {"undone": True}
                if answer.status != 200:
                    sent.outcome = "refused"
                    if why := dialects.refused(dialect, answer.status, answer.headers, body):
                        self.violate("honest", f"{method} {path} at gateway {gateway}: {why}")
                    return None
                sent.outcome = "answered"
                return json.loads(body) if answer.content_type == "application/json" else body
        except TimeoutError:
            sent.outcome, sent.why = "silent", path
        except aiohttp.ClientError as error:
            sent.outcome, sent.why = "lost", f"{type(error).__name__}: {error}"
        finally:
            sent.ended_s = time.monotonic()
        return None
