"""A model's chat template: messages in, text out, as Hugging Face's apply_chat_template(tokenize=False) renders them.

Same environment (sandboxed and immutable, trim_blocks, lstrip_blocks, loop controls, the `generation` tag) and the same
helpers (raise_exception, strftime_now, tojson without HTML escapes). A template comes with a model and is not trusted;
what users wrote is data to it, and masked (masking.py). Knows nothing of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from gateway.errors import BadRequestError
from gateway.prompt.masking import Masking
from gateway.types import Marker, Tool

_DICT_ATTRIBUTES = frozenset(dir(dict))
_PLAIN_ATTRIBUTES: dict[type, frozenset[str]] = {
    # str.format and format_map reach into objects: those stay with the sandbox.
    str: frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"},
    LoopContext: frozenset(
        {"index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem"}
    ),
}
"""Attributes that are safe whatever the object holds."""


class ChatTemplate:
    """One compiled template. Rendering is pure, apart from strftime_now, and safe from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], masking: Masking) -> None:
        """Raises ValueError, with the line, for a template that Jinja cannot compile.

        special_tokens  names that the template may use ("bos_token", ...) -> text
        """
        self._masking = masking
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _make_tojson(masking.sequences)
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _Namespace,
            "dict": _dict,
        }
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno} of the chat template: {error.message}") from None
        self.is_timeless = "strftime_now" not in source  # the same messages always render to the same text
        self._variables = {"tools": None, "documents": None, **special_tokens}
        self._fills_tools = False
        self._fills_tools = self.takes_tools and not self._takes_bare_tools()

    def _takes_bare_tools(self) -> bool:
        """Whether a tool without description and parameters can be rendered, and not as Python's `None`."""
        question, tools = [{"role": "user", "content": "?"}], (Tool("f", "", {}), Tool("f"))
        try:
            shown = [self.render(question, tools=(tool,), add_generation_prompt=True) for tool in tools]
        except BadRequestError:
            return False
        return shown[0].count("None") == shown[1].count("None")

    def render_open(
        self, messages: Sequence[Mapping[str, Any]], markers: Sequence[Marker] = (), *, tools: Sequence[Tool] = ()
    ) -> str:
        """As `render`, up to the end of the last message's content, from where it goes on.

        Raises BadRequestError for a template that does not show that content as it is.
        """
        last = len(messages) - 1
        end = Marker(last, len(messages[last]["content"]), 0.0)
        marked = self.render(messages, (*markers, end), tools=tools, add_generation_prompt=False)
        text, found, _ = marked.rpartition(self._masking.markers[len(markers)])
        closed = text if markers else self.render(messages, tools=tools, add_generation_prompt=False)
        if not found or not closed.startswith(text):
            why = "The chat template of this model changes the last message, so that no answer can go on with it."
            raise BadRequestError(why)
        return text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        markers: Sequence[Marker] = (),
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool,
    ) -> str:
        """Masked text, with masking.markers where the messages are marked, in their order.

        Tools are left out by a template that does not take them (`takes_tools`). Raises BadRequestError with the
        template's own words, or with what it missed in the messages.
        """
        masked = self._masking.mask_data(messages)
        given = (
            {"tools": self._masking.mask_data([_described(tool, self._fills_tools) for tool in tools])} if tools else {}
        )
        # From the end of each message, so that places further left stay valid.
        sequences = self._masking.markers[: len(markers)]
        for _, _, number in sorted((marker.message, marker.chars, i) for i, marker in enumerate(markers))[::-1]:
            marker, sequence = markers[number], sequences[number]
            if marker.tool is not None:
                _append(given["tools"][marker.tool]["function"], sequence)
                continue
            message = masked[marker.message]
            if marker.call is not None:
                _append(message["tool_calls"][marker.call]["function"], sequence)
            else:
                message["content"] = self._masking.insert(message["content"], marker.chars, sequence)
        try:
            return self._template.render(
                self._variables, messages=masked, add_generation_prompt=add_generation_prompt, **given
            )
        except Exception as error:
            # A template is a program that we did not write: what it trips over is something in the messages.
            message = self._masking.unmask(str(error)) or type(error).__name__
            raise BadRequestError(f"The chat template of this model cannot render these messages: {message}") from None


def _described(tool: Tool, filled: bool) -> dict[str, Any]:
    """As the OpenAI API writes it, which is what templates are made for, with null for what is missing, as vLLM has it.
    `filled`: for a template that takes for granted what may be missing."""
    description, schema = tool.description, tool.parameters
    if filled:
        description, schema = description or "", {"type": "object", "properties": {}} if schema is None else schema
    return {"type": "function", "function": {"name": tool.name, "description": description, "parameters": schema}}


def _append(value: Any, sequence: str) -> bool:
    """Puts the sequence behind the last string of JSON-like data, keys not counted. False when there is none."""
    if type(value) is not dict and type(value) is not list:
        return False
    keys: list[Any] = list(value) if type(value) is dict else list(range(len(value)))
    for key in reversed(keys):
        if type(value[key]) is str:
            value[key] += sequence
            return True
        if _append(value[key], sequence):
            return True
    return False


class _Environment(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """Jinja's own result, found sooner for what templates ask all the time: `message.role`, `text.strip`,
        `loop.index0`. Templates render a hundred messages per request, and the sandbox's checks were most of it.
        """
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES and attribute in obj:
                return obj[attribute]
        elif attribute in _PLAIN_ATTRIBUTES.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """The same for `message['tool_calls']`: what is not there is found out without raising and catching."""
        if type(obj) is dict and type(argument) is str:
            if argument in obj:
                return obj[argument]
            if argument not in _DICT_ATTRIBUTES:
                return self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks what an assistant said, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(Namespace):
    """namespace() whose attributes cannot be Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        Namespace.__setitem__(self, name, value)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """dict() as a function, without the attributes of the type."""
    return dict(*args, **kwargs)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have an attribute {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - the name templates know
    return datetime.now().strftime(format)


def _make_tojson(sequences: Sequence[str]) -> Any:
    # What JSON made of a mark comes behind an even number of backslashes; those of the text itself come in pairs.
    originals = {json.dumps(sequence)[1:-1]: sequence for sequence in sequences}
    escaped = re.compile(rf"(?<!\\)((?:\\\\)*)({'|'.join(map(re.escape, originals))})")

    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        text = json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return escaped.sub(lambda found: found[1] + originals[found[2]], text) if ensure_ascii else text

    return tojson


Render = Callable[[Sequence[Marker]], str]


def find_markers(text: str, markers: Sequence[Marker], render: Render, masking: Masking) -> list[int]:
    """Character offsets in `text`, one for each marker; 0 for one that the template does not render.

    The text that is tokenised is never the marked one, so that a breakpoint changes no token. A template that reads
    what it renders (strips it, looks at how it ends) may render something else around a marker; then the two texts are
    compared, and the breakpoint is put where they begin to differ, which is at the marker or before it, never after.

    text    masked, as rendered without markers
    render  the same messages with some of the markers
    """
    found = _find(text, len(markers), _rendered(markers, render), masking)
    if found is not None:
        return found
    return [_first_difference(text, _rendered([marker], render), masking) for marker in markers]


def _rendered(markers: Sequence[Marker], render: Render) -> str:
    try:
        return render(markers)
    except BadRequestError:  # the template refuses contents with markers, and took those without
        return ""


def _find(text: str, count: int, marked: str, masking: Masking) -> list[int] | None:
    """None when anything but the markers has changed, or not every marker is there once."""
    sequences = masking.markers[:count]
    places = [marked.find(sequence) for sequence in sequences]
    width, done, unmarked = len(sequences[0]), 0, 0
    found = [0] * count
    for place, which in sorted(zip(places, range(count), strict=True)):
        if place < 0 or not text.startswith(marked[done:place], unmarked):
            return None
        found[which] = unmarked = unmarked + place - done
        done = place + width
    # What is left has no marker, or it would not be equal to text that has none.
    return found if marked[done:] == text[unmarked:] else None


def _first_difference(text: str, marked: str, masking: Masking) -> int:
    if masking.markers[0] not in marked:
        return 0
    low, high = 0, min(len(text), len(marked))  # the common beginning is at least `low` long, and at most `high`
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(marked[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low - 1 if text[:low].endswith(masking.mark) else low  # a mark and its code stay together
