"""Breakpoints become token offsets, exactly, and change nothing else about a prompt."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from engine.protocol import Breakpoint, Sampling, TokenizerFiles
from gateway.config import PromptSettings
from gateway.errors import BadRequestError
from gateway.prompt.masking import Masking
from gateway.prompt.stage import PromptStage
from gateway.prompt.template import ChatTemplate
from gateway.types import MAX_BREAKPOINTS, MAX_MARKERS, ChatPrompt, EncodedPrompt, Marker, Request, Tenant, Tool
from tests.fakes import tokenisers
from tests.fakes.tuned import tuned

QUICK = settings(max_examples=40, deadline=None)  # each example runs an event loop
CHATTING = ["llama3", "qwen", "shuffled_ids", "llama2", "llama2_legacy", "gemma", "wordpiece", "unigram"]
SENTINEL = "\ue123"

CONTENTS = st.lists(
    st.sampled_from(
        ["Hello", " there ", "漢字仮名", "a\n\nb ", "", "  you and me\n", "xyz" * 20, "e\u0301 ﬁ", "<tool_call>"]
    )
    | st.text(st.characters(exclude_categories=["Cs", "Co", "Cn", "Cc"]), max_size=12),
    min_size=1,
    max_size=5,
)


class Loaded:
    """A stage with one model, and the slow twin: a sentinel in the messages, and the offsets of the library."""

    def __init__(self, name: str, **settings: int) -> None:
        self.files: TokenizerFiles = tokenisers.ALL[name]()
        self.hello = tokenisers.hello(self.files)
        self.stage = PromptStage(tuned(PromptSettings, **settings))
        asyncio.run(self.stage.load(self.hello, self.files))
        self.hf = HfTokenizer.from_str(self.files.tokenizer_json)
        self.template = ChatTemplate(self.files.chat_template or "", self.files.special_tokens, Masking([]))

    async def encode(self, prompt: ChatPrompt) -> EncodedPrompt:
        asked = Request("r", Tenant("t"), "model", prompt, Sampling(5), received_s=0.0, deadline_s=0.0)
        return await self.stage.encode(asked, self.hello)

    def breakpoints(self, prompt: ChatPrompt) -> tuple[Breakpoint, ...]:
        """One marker at a time."""
        text = self.template.render(prompt.messages, add_generation_prompt=True)
        offsets = self.hf.encode(text, add_special_tokens=False).offsets
        ttls: dict[int, float] = {}
        for marker in prompt.markers:
            messages = [dict(message) for message in prompt.messages]
            content = messages[marker.message]["content"]
            messages[marker.message]["content"] = content[: marker.chars] + SENTINEL + content[marker.chars :]
            marked = self.template.render(messages, add_generation_prompt=True)
            place = marked.index(SENTINEL)
            if marked.replace(SENTINEL, "") != text:  # it was trimmed otherwise
                place = next(i for i in range(len(marked)) if not text.startswith(marked[: i + 1]))
            tokens = next((i for i, (_, end) in enumerate(offsets) if end > place), len(offsets))
            ttls[tokens] = max(ttls.get(tokens, 0.0), marker.ttl_s)
        return tuple(Breakpoint(*item) for item in sorted(ttls.items()) if item[0])


@pytest.fixture(scope="module", params=CHATTING)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return Loaded(request.param, prompt_memo_bytes=0, thread_chars=40)  # so that the memos below it are asked


@pytest.fixture(scope="module")
def qwen() -> Loaded:
    return Loaded("qwen")


def chat(*contents: str, markers: tuple[Marker, ...] = ()) -> ChatPrompt:
    roles = ["user", "assistant"]
    return ChatPrompt([{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], markers=markers)


@st.composite
def marked_chats(draw: st.DrawFn) -> ChatPrompt:
    contents = draw(CONTENTS)
    places = st.integers(0, len(contents) - 1).flatmap(
        lambda message: st.tuples(st.just(message), st.integers(0, len(contents[message])))
    )
    found = draw(st.lists(places, min_size=1, max_size=MAX_BREAKPOINTS, unique=True))
    return chat(*contents, markers=tuple(Marker(*place, float(60 + i)) for i, place in enumerate(found)))


@QUICK
@given(prompt=marked_chats())
def test_breakpoints_are_where_the_slow_twin_finds_them(loaded: Loaded, prompt: ChatPrompt) -> None:
    async def run() -> None:
        expected = loaded.breakpoints(prompt)
        assert (await loaded.encode(prompt)).breakpoints == expected
        again = await loaded.encode(prompt)
        assert (again.breakpoints, again.new_tokens) == (expected, 0)

    asyncio.run(run())


@QUICK
@given(prompt=marked_chats())
def test_breakpoints_change_no_token_and_no_digest(loaded: Loaded, prompt: ChatPrompt) -> None:
    async def run() -> None:
        marked, plain = await loaded.encode(prompt), await loaded.encode(replace(prompt, markers=()))
        assert (marked.tokens, marked.digests) == (plain.tokens, plain.digests)
        assert plain.new_tokens == 0
        assert plain.breakpoints == ()

    asyncio.run(run())


PIECES = st.lists(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "<", "⸻", "⸺", "text", " "]), min_size=1, max_size=6)


@QUICK
@given(data=st.data(), pieces=PIECES)
def test_special_strings_that_users_typed_move_no_breakpoint(
    qwen: Loaded, data: st.DataObject, pieces: list[str]
) -> None:
    content = "".join(pieces)
    chars = data.draw(st.integers(1, len(content)))
    encoded = asyncio.run(qwen.encode(chat("first", content, markers=(Marker(1, chars, 1.0),))))
    (point,) = encoded.breakpoints
    ids = array("I", encoded.tokens).tolist()
    before = "<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\n" + content[:chars]
    kept = [qwen.hf.decode(ids[:count], skip_special_tokens=False) for count in (point.tokens, point.tokens + 1)]
    assert before.encode().startswith(kept[0].rstrip("\ufffd").encode())
    assert len(kept[1]) > len(before) or kept[1].endswith("\ufffd")


async def test_two_breakpoints_at_one_token_are_one_that_lasts_longest(qwen: Loaded) -> None:
    markers = (Marker(0, 4, 60.0), Marker(0, 5, 300.0), Marker(0, 0, 1.0))
    encoded = await qwen.encode(chat("12345", markers=markers[:1]))
    both = await qwen.encode(chat("Zz" * 40, markers=(Marker(0, 80, 60.0), Marker(0, 80, 300.0))))
    assert len(encoded.breakpoints) == len(both.breakpoints) == 1
    assert both.breakpoints[0].ttl_s == 300.0
    assert [point.ttl_s for point in (await qwen.encode(chat("12345", markers=markers))).breakpoints] == [
        1.0,
        60.0,
        300.0,
    ]


async def test_the_end_of_a_message_lies_before_what_the_template_closes_it_with(qwen: Loaded) -> None:
    encoded = await qwen.encode(chat("Hello there", markers=(Marker(0, 11, 1.0),)))
    ids = array("I", encoded.tokens).tolist()
    assert ids[encoded.breakpoints[0].tokens] == qwen.hf.token_to_id("<|im_end|>")


async def test_a_marked_turn_costs_what_the_turn_costs(qwen: Loaded) -> None:
    book = "a document that many turns are about " * 40
    marker = (Marker(0, len(book), 60.0),)
    first = await qwen.encode(chat(book, "yes", markers=marker))
    second = await qwen.encode(chat(book, "yes", "one more", markers=marker))
    assert first.breakpoints == second.breakpoints
    assert 0 < second.new_tokens < 20
    stats = qwen.stage.stats()["model"]
    assert (await qwen.encode(chat(book, "yes", "one more", markers=marker))).breakpoints == second.breakpoints
    assert qwen.stage.stats()["model"]["prompt_memo_hit_segments"] == stats["prompt_memo_hit_segments"] + 1
    assert (await qwen.encode(chat(book, "yes", "one more"))).breakpoints == ()


def with_template(template: str) -> Loaded:
    """Qwen's tokeniser with another chat template."""
    found = Loaded("qwen")
    found.files = replace(found.files, chat_template=template)
    found.hello = tokenisers.hello(found.files)
    asyncio.run(found.stage.load(found.hello, found.files))
    return found


LOOP = "{% for message in messages %}BODY<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("body", "contents", "place", "before"),
    [
        ("{{ message.content | trim }}", ["  text  "], (0, 8), "text"),
        ("{{ message.content | trim }}", ["  text  "], (0, 4), "te"),
        (
            "{% if message.content.endswith('!') %}loud {% endif %}{{ message.content }}",
            ["a!", "b!"],
            (1, 2),
            "loud a!<|im_end|>",
        ),
        ("{{ message.content.split('</think>')[-1] }}", ["ab</think>cd"], (0, 1), None),
        ("{{ message.content.split('</think>')[-1] }}", ["ab</think>cd"], (0, 11), "c"),
        ("{{ message.content }}{{ message.content }}", ["abc"], (0, 2), "ab"),
        ("{{ message.content | tojson }}", ['say "é"'], (0, 5), '"say \\"'),
        ("{{ message.content | upper }}", ["abc"], (0, 2), "AB"),
        ("{% if loop.first %}{{ message.content }}{% endif %}", ["abc", "def"], (1, 2), None),
        ("{% if message.content | length > 3 %}{{ raise_exception('no') }}{% endif %}", ["abc"], (0, 2), None),
    ],
)
async def test_a_template_that_reads_its_messages_gets_the_breakpoint_there_or_before(
    body: str, contents: list[str], place: tuple[int, int], before: str | None
) -> None:
    loaded = await asyncio.to_thread(with_template, LOOP.replace("BODY", body))
    prompt = chat(*contents, markers=(Marker(*place, 60.0),))
    encoded = await loaded.encode(prompt)
    plain = await loaded.encode(replace(prompt, markers=()))
    assert (encoded.tokens, encoded.digests) == (plain.tokens, plain.digests)
    if before is None:
        assert encoded.breakpoints == ()
        return
    (point,) = encoded.breakpoints
    ids = array("I", encoded.tokens).tolist()
    text = loaded.hf.decode(ids[: point.tokens], skip_special_tokens=False)
    longer = loaded.hf.decode(ids[: point.tokens + 1], skip_special_tokens=False)
    assert before.startswith(text)
    assert not before.startswith(longer)


WITH_CALLS = (
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>"
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function | tojson }}]{% endfor %}<|im_end|>{% endfor %}"
)


async def test_breakpoints_behind_tools_and_calls_are_behind_the_last_text_in_them() -> None:
    loaded = await asyncio.to_thread(with_template, WITH_CALLS)
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"city": "Oslo", "days": [1, 2]}}},
        {"id": "2", "type": "function", "function": {"name": "nothing", "arguments": {}}},
    ]
    tools = (
        Tool("f", "Tells.", {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}}),
        Tool("nothing", None, {"type": "object"}),
    )
    prompt = ChatPrompt([{"role": "assistant", "content": "a", "tool_calls": calls}], tools=tools)
    in_tools = Marker(0, 0, 1.0, tool=0), Marker(0, 0, 2.0, tool=1)
    in_calls = Marker(0, 0, 3.0, call=0), Marker(0, 0, 4.0, call=1)
    encoded = await loaded.encode(replace(prompt, markers=in_tools + in_calls))
    assert encoded.tokens == (await loaded.encode(prompt)).tokens
    ids = array("I", encoded.tokens).tolist()
    assert [point.ttl_s for point in encoded.breakpoints] == [1.0, 2.0, 3.0, 4.0]
    whole = loaded.hf.decode(ids, skip_special_tokens=False)
    for point, end in zip(encoded.breakpoints, ("Rome", '"object', "Oslo", '"nothing'), strict=True):
        place = whole.rindex(end) + len(end)
        before, after = (loaded.hf.decode(ids[: point.tokens + more], skip_special_tokens=False) for more in (0, 1))
        assert len(before) <= place < len(after)


async def test_a_breakpoint_behind_too_few_tokens_is_none(qwen: Loaded) -> None:
    prompt = chat("first words", "more of them", markers=(Marker(0, 11, 60.0), Marker(1, 12, 60.0)))
    short, long = (await qwen.encode(prompt)).breakpoints
    for least, found in ((short.tokens, (short, long)), (short.tokens + 1, (long,)), (long.tokens + 1, ())):
        assert (await qwen.encode(replace(prompt, min_breakpoint_tokens=least))).breakpoints == found


async def test_as_many_places_as_there_are_blocks_before_a_breakpoint_are_found(qwen: Loaded) -> None:
    text = "one two three four five six " * 20
    places = tuple(Marker(0, chars, 0.0) for chars in range(4, 4 + MAX_MARKERS))
    found = (await qwen.encode(chat(text, markers=places))).breakpoints
    one_by_one = {(await qwen.encode(chat(text, markers=(place,)))).breakpoints[0].tokens for place in places[::7]}
    assert one_by_one <= {point.tokens for point in found}


async def test_a_message_that_is_continued_is_open_at_its_end(qwen: Loaded) -> None:
    prompt = ChatPrompt(
        [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Well, I <|im_end|>"}]
    )
    opened = await qwen.encode(replace(prompt, continues=True, markers=(Marker(1, 7, 60.0), Marker(1, 18, 60.0))))
    closed = await qwen.encode(replace(prompt, add_generation_prompt=False))
    assert closed.tokens.startswith(opened.tokens)
    ids = array("I", opened.tokens).tolist()
    assert qwen.hf.decode(ids, skip_special_tokens=False).endswith("Well, I <|im_end|>")
    assert ids[-1] != array("I", closed.tokens).tolist()[opened.num_tokens], "what was typed is text, and no token"
    assert opened.breakpoints[-1].tokens == opened.num_tokens
    assert len(opened.breakpoints) == 2


@pytest.mark.parametrize("body", ["{{ message.content | upper }}", "{{ message.content[:1] }}", "x"])
async def test_a_template_that_changes_the_last_message_cannot_go_on_with_it(body: str) -> None:
    loaded = await asyncio.to_thread(with_template, LOOP.replace("BODY", body))
    prompt = ChatPrompt([{"role": "assistant", "content": "abc"}], continues=True)
    if "upper" in body:
        assert loaded.hf.decode(array("I", (await loaded.encode(prompt)).tokens).tolist()) == "ABC"
        return
    with pytest.raises(BadRequestError, match="changes the last message"):
        await loaded.encode(prompt)
