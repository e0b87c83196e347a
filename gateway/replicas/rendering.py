"""Prompts that a server renders in another way than we do: it is asked for its own tokens of them, and sent those.

So answers, tools, grammars, the index, receipts and leases are the same for every shape of request. What is known of a
server's rendering is checked again and again, because a server may be deployed anew behind the same URL:

    canaries  at join, every CHECK_S and after each finding: all shapes (parity.py), its start, and whether it counts as
              many tokens as it is sent
    audits    one in AUDITED prompts that are sent in our tokens is tokenised by the server as well, beside its answer
    counts    each answer says how many tokens its prompt has, most which: another number than was sent is a
              miscount. That request goes to another engine; after MISCOUNTS the server is not used

Belongs to one server in one lifetime; joining.py starts and stops it, replica.py asks it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import aiohttp

from engine.protocol import Hello
from gateway import tasks
from gateway.config import ReplicaSettings
from gateway.digests import derived_salt
from gateway.errors import BadRequestError, EngineLostError, KvasirError, UnsupportedError
from gateway.replicas.answers import wrong_count
from gateway.replicas.base import ServerFacts
from gateway.replicas.calls import NAMES, Caller, ServerError, mapping, whole
from gateway.replicas.parity import (
    ANSWER_TIMEOUT_S,
    CANARIES,
    Parity,
    Shape,
    TokenSource,
    check_parity,
    encoder,
    first_difference,
    shapes_of,
)
from gateway.replicas.servers import find_lifetime
from gateway.types import EncodedPrompt, Request, TokenPrompt

log = logging.getLogger(__name__)

CHECK_S: Final = 60.0
AUDITED: Final = 50
MISCOUNTS: Final = 3
MISCOUNT_WINDOW: Final = 100
"""So many miscounts within so many answers, and the server is not used."""

_LOOKS: Final = 3

MOST_SPELLED: Final = 4096
"""Tokens that differ of an audited prompt, up to which their texts are compared."""


class Prompts(Protocol):
    """What prompt/stage.py does for a replica."""

    async def encode(self, request: Request, model: Hello) -> EncodedPrompt: ...

    async def adopt(
        self, prompt: EncodedPrompt, ids: bytes, rendering: str, request: Request, model: Hello
    ) -> EncodedPrompt: ...


class Rendering:
    """`refusal`: why the server must not be used any more, and `retry_s` how long; empty while it may."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        settings: ReplicaSettings,
        facts: ServerFacts,
        hello: Hello,
        prompts: Prompts,
        spell: Callable[[int], str],
    ) -> None:
        """`hello` of its first rank, `spell` the text of a token id."""
        self._session, self._settings, self._facts, self._hello = session, settings, facts, hello
        self._encode, self._adopt, self._spell = encoder(prompts.encode, hello), prompts.adopt, spell
        self._source = TokenSource(session, settings, facts)
        self._audited: dict[Shape, str] = {}  # differences that canaries do not have
        self._audit: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._sent = 0  # prompts in our tokens
        self._answers = 0
        self._misses: deque[int] = deque(maxlen=MISCOUNTS)  # numbers of answers
        self._counts = {"rendered": 0, "audits": 0, "checks": 0, "miscounted": 0}
        self.parity = Parity({}, {})
        self.refusal, self.retry_s = "", 0.0

    async def start(self) -> None:
        """Checks everything, and again every CHECK_S until `stop`. Raises ServerError for a server that cannot be
        used."""
        await self._check()
        if self.refusal:
            raise ServerError(f"replica {self._settings.name} ({self._settings.url}): {self.refusal}")
        self._watching = tasks.spawn(self._watch(), name=f"check {self._settings.name}")

    async def stop(self) -> None:
        await tasks.cancel(self._watching)
        await tasks.cancel(self._audit)

    async def ends_turns(self, token: str) -> bool:
        """Whether it is in a conversation as we render one, beyond its begin; also where that cannot be known."""
        try:
            ids = await self._encode(CANARIES["turns"])
        except KvasirError:
            return True
        return not token or token in map(self._spell, ids[1:])

    def figures(self) -> dict[str, Any]:
        """Shapes that differ, with the first token that does, shapes that were not compared, with the reason, and
        counters: prompts rendered by the server, audits, checks, and answers to another number of tokens than sent."""
        return {"different": dict(self.parity.different), "unchecked": dict(self.parity.unchecked), **self._counts}

    # -- prompts -------------------------------------------------------------------------------------------------------

    async def render(self, prompt: EncodedPrompt, request: Request, hello: Hello) -> EncodedPrompt:
        """See stages.Engine."""
        if self.refusal:
            raise EngineLostError(f"Engine {self._settings.name} is not used: {self.refusal}.")
        if prompt.rendering is None or isinstance(request.prompt, TokenPrompt):
            return prompt
        why = self.parity.reason(request.prompt)
        rendering = "" if why is None else self.parity.rendering
        if prompt.rendering == rendering:
            return prompt
        server = f"{NAMES[self._facts.kind]} {self._facts.version}".strip()
        salt = derived_salt(hello.namespace.salt, request.salt) if request.use_cache else uuid.uuid4().hex
        try:
            ids = await self._source.ask(request.prompt, salt)
        except ServerError as error:
            if error.status is not None and 400 <= error.status < 500 and error.status != 429:
                message = f"{server}, which serves this model, refuses the request: {str(error).partition('; ')[2]}"
                raise BadRequestError(message, param=request.prompt_param) from None
            raise EngineLostError(f"Engine {self._settings.name} does not say its tokens of a prompt.") from None
        if isinstance(ids, int):
            message = f"{server}, which serves this model, renders such prompts in another way ({why}), which it hides."
            raise UnsupportedError(message, param=request.prompt_param)
        self._counts["rendered"] += 1
        return await self._adopt(prompt, array("I", ids).tobytes(), rendering, request, hello)

    def sent(self, prompt: EncodedPrompt, request: Request) -> None:
        """A prompt was sent. Now and then the server is asked for its own tokens of it."""
        forced = request.tool_use is not None and request.tool_use.mode == "required"  # a call is begun in the prompt
        if prompt.rendering != "" or forced or not self._source.tokenizes(request.prompt):
            return
        if isinstance(request.prompt, TokenPrompt):
            return
        self._sent += 1
        if self._sent % AUDITED == 1 and (self._audit is None or self._audit.done()):
            self._audit = tasks.spawn(self._compare(prompt, request), name=f"audit {self._settings.name}")

    def answered(self, wrong: str | None) -> None:
        """An answer said what its prompt was; `wrong` is what is wrong with that."""
        self._answers += 1
        if wrong is None:
            return
        self._counts["miscounted"] += 1
        self._misses.append(self._answers)
        if len(self._misses) == MISCOUNTS and self._answers - self._misses[0] < MISCOUNT_WINDOW:
            self._refuse(wrong)

    def _refuse(self, wrong: str) -> None:
        self.refusal, self.retry_s = f"it answers another prompt than it is sent: {wrong}", CHECK_S

    # -- checks --------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while not tasks.was_cancelled():
            await asyncio.sleep(CHECK_S)
            await self._check()

    async def _check(self) -> None:
        self._counts["checks"] += 1
        try:
            if self._counts["checks"] > 1 and await self._is_another():
                self.refusal = self.refusal or "it was started anew"
                return
            if (wrong := await self._miscount()) is not None:
                self._refuse(wrong)
        except ServerError:
            if self._counts["checks"] == 1:
                raise
            return
        self._note(await check_parity(self._source, self._encode, self._spell, proven=self._counts["checks"] > 1))

    async def _is_another(self) -> bool:
        """Than the one that joined. Behind a load balancer another one answers now and then; that is none."""
        for _ in range(_LOOKS):
            lifetime = await find_lifetime(self._session, self._settings)
            if not lifetime or not self._facts.lifetime or lifetime == self._facts.lifetime:
                return False
        return True

    async def _miscount(self) -> str | None:
        """What is wrong with the tokens that it says it was sent. Computes one."""
        ids = list(await self._encode(CANARIES["text"]))
        body = {"model": self._facts.models[0], "prompt": ids, "max_tokens": 1, "temperature": 0}
        if "cache_salt" in self._facts.features:
            body["cache_salt"] = uuid.uuid4().hex
        answer = await Caller(self._session, self._settings).ask(
            "v1/completions", ANSWER_TIMEOUT_S, body, optional=True
        )
        return wrong_count(len(ids), whole(mapping(mapping(answer).get("usage")).get("prompt_tokens")))

    def _note(self, found: Parity) -> None:
        """What was known of shapes that could not be compared now stays, as what audits found does."""
        before = self.parity.different
        kept = {shape: words for shape, words in before.items() if shape in found.unchecked}
        different = {**self._audited, **kept, **found.different}
        self.parity = Parity(different, found.unchecked, found.rendering)
        if new := [shape for shape in different if shape not in before]:
            names = ", ".join(shape.replace("_", " ") for shape in new)
            text = "replica %s: the server renders requests with %s in its own way, so it is asked for its tokens (%s)"
            log.warning(text, self._settings.name, names, different[new[0]])

    async def _compare(self, prompt: EncodedPrompt, request: Request) -> None:
        """The audit of a prompt that was sent."""
        self._counts["audits"] += 1
        try:
            theirs = await self._source.ask(request.prompt)
        except ServerError:
            return
        ours = array("I", prompt.tokens).tolist()
        if isinstance(theirs, int) or _same(ours, theirs, self._spell):
            return
        found = await check_parity(self._source, self._encode, self._spell, proven=True)
        if found.reason(request.prompt) is None:
            words = first_difference(ours, theirs, self._spell) or ""
            shapes = shapes_of(request.prompt)
            self._audited |= dict.fromkeys(shapes - {"plain"} or shapes, words)
        self._note(found)


def _same(ours: Sequence[int], theirs: Sequence[int], spell: Callable[[int], str]) -> bool:
    """Whether both are the same text: special strings in a message are text to us, and tokens to most servers."""
    if ours == theirs:
        return True
    least = min(len(ours), len(theirs))
    start = next((at for at in range(least) if ours[at] != theirs[at]), least)
    end = next((at for at in range(least - start) if ours[-1 - at] != theirs[-1 - at]), least - start)
    middle = ours[start : len(ours) - end], theirs[start : len(theirs) - end]
    if max(map(len, middle)) > MOST_SPELLED:
        return False
    one, other = ("".join(map(spell, ids)) for ids in middle)
    return one == other
