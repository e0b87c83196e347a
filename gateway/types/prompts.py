"""What a request gives a model to go on from, before and after it is tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from engine.protocol import TOKEN_BYTES, Breakpoint, Grammar
from engine.protocol.frozen import dataclass

MAX_BREAKPOINTS = 4
"""Of one request. What more of them means differs by dialect; an engine gets no more."""


MAX_MARKERS = 160
"""Places that the prompt stage looks for in one prompt."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A breakpoint before the prompt is tokens: right after the first `chars` characters of a message's content, or
    behind one of its tool calls, or behind a tool.

    call   number among the message's calls; `chars` says nothing then
    tool   number among the prompt's tools; `message` and `chars` say nothing then
    media  of those in the message, how many come before it

    Behind a call or a tool means behind the last text in it: what closes it, and has no text, may come after.
    """

    message: int
    chars: int
    ttl_s: float
    call: int | None = None
    tool: int | None = None
    media: int = 0


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a file or a sound right after the first `chars` characters of a message's content. Upstreams of other
    APIs are given it; engines are not, and no template sees it.

    mime_type  in lower case, without parameters; empty where a URL alone says nothing
    data       base64 with the standard alphabet and padding; empty where there is a URL, or an uploaded file is named
    url        http or https
    name       of a file
    detail     how closely a model looks at an image, in OpenAI's words; empty: as it likes
    path       in the client's request, for error messages
    refusal    what a client is told whose model reads text alone
    """

    kind: Literal["image", "file", "audio", "video"]
    path: str
    refusal: str
    mime_type: str = ""
    data: str = ""
    url: str = ""
    name: str = ""
    detail: str = ""
    message: int = 0
    chars: int = 0


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    parameters  a JSON Schema of type object for its arguments; None takes no arguments
    strict      its arguments are held to the schema also where the model chooses to call it, if its calls begin with a
                token of their own
    path        of `parameters` in the client's request, for error messages
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    path: str = "tools"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer may do with the tools of its prompt.

    callable  the tools that it may call: all of the prompt's, or some of them
    mode      "auto": text or calls; "required": one call or more, and nothing else
    parallel  whether there may be more than one call
    """

    callable: tuple[Tool, ...]
    mode: Literal["auto", "required"] = "auto"
    parallel: bool = True


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True, slots=True)
class Thinking:
    """What a request says of the thoughts that come before the answer. Engines pass over it.

    effort  "none": there are to be none; None: as many as the model likes, up to `budget`
    budget  tokens of thoughts at most
    shown   whether the answer is to have their text
    """

    effort: Effort | None = None
    budget: int | None = None
    shown: bool = True

    @property
    def is_on(self) -> bool:
        return self.effort != "none"


@dataclass(frozen=True, slots=True)
class Thought:
    """Of an earlier answer: what the API that gave the answer wants to see again. Engines pass over it.

    message    number among the prompt's
    call       number of the message's call that it comes before; -1: it comes before the text
    signature  as the client has it from the answer: one of ours (upstreams/translation/thoughts.py), or any other
    """

    message: int
    call: int
    signature: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages as the chat template wants them: "role" and "content" (a string), "tool_calls", "name", ...

    media  of users and results of tools, in the order of the prompt
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    markers: tuple[Marker, ...] = ()  # MAX_BREAKPOINTS at most, where the prompt goes to an engine
    tools: tuple[Tool, ...] = ()
    min_breakpoint_tokens: int = 0  # a marker after fewer is no breakpoint
    continues: bool = False  # the answer goes on with the last message, which is an assistant's
    thoughts: tuple[Thought, ...] = ()  # in their order; none, where the prompt goes to an engine
    media: tuple[Media, ...] = ()


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that is continued as it is. Special strings in it are text, not tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids that are continued as they are, TOKEN_BYTES each; nothing is put in front of them."""

    tokens: bytes


@dataclass(frozen=True, slots=True)
class Constraint:
    """The grammar of an answer, and the parameter that asked for it, for error messages.

    param   the parameter
    places  paths inside of the grammar, and those in the client's request that they stand for
    """

    grammar: Grammar
    param: str
    places: tuple[tuple[str, str], ...] = ()


Prompt = ChatPrompt | TextPrompt | TokenPrompt


PromptParam = Literal["messages", "prompt", "input", "contents"]


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """A text and how many numbers its vector is to have.

    tokens      ids of the embedding model, its special tokens included
    dimensions  the model's own, or fewer
    """

    tokens: Sequence[int]
    dimensions: int


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as engines and index know it.

    tokens       token ids, TOKEN_BYTES each
    digests      chain digests of its full blocks, DIGEST_BYTES each, under the namespace with the request's salt
    breakpoints  where the client asked for caching, shortest first, each at another token
    rendering    whose rendering the tokens are: empty for our own, else the fingerprint of a server's (replicas/
                 rendering.py). None: tokens of an answer are behind it, and it is continued as it is
    """

    tokens: bytes
    digests: bytes
    new_tokens: int = 0  # tokens of segments that were not in the memo
    breakpoints: tuple[Breakpoint, ...] = ()
    rendering: str | None = ""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES
