"""The demo model keeps its promises: small, quick to load, English-looking, and a chat format that only ever grows."""

import gzip
import json
import re
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from engine.demo import MODEL_DIR  # noqa: E402
from tests.demo_model.books import Library, balance_quotes, read_book, split_sentences  # noqa: E402
from tests.demo_model.tokeniser import CHAT_TEMPLATE, SPECIAL_TOKENS, VOCAB_SIZE, render_turn, train_tokeniser  # noqa: E402

END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(3)

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be brief.\n\n"},
    {"role": "developer", "content": [{"type": "text", "text": "No "}, {"type": "text", "text": "jokes. "}]},
    {"role": "user", "content": "Who is Mr. Darcy?\n"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"name":  "Darcy"}'}},
            {"id": "2", "type": "function", "function": {"name": "count", "arguments": {"to": 3, "of": "<é>"}}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "a man of large fortune"},
    {"role": "assistant", "content": "Let me look again.", "tool_calls": [{"function": {"name": "find"}}]},
    {"role": "assistant", "content": " Nobody. "},
]


@pytest.fixture(scope="module")
def tokeniser() -> Any:
    """The tokeniser as a user of transformers gets it."""
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> Any:
    """The model in the dtype it is stored in."""
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()


def render(tokeniser: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """The chat as text."""
    text = tokeniser.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def say(tokeniser: Any, model: Any, text: str, num_tokens: int) -> str:
    """What the model adds greedily to a text, special tokens included."""
    inputs = tokeniser(text, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    decoded = tokeniser.decode(output[0, inputs["input_ids"].shape[1] :])
    assert isinstance(decoded, str)
    return decoded


# --- the folder ---


def test_the_folder_is_at_most_12_megabytes() -> None:
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 12_000_000


def test_the_folder_holds_weights_in_bfloat16_that_the_config_describes(model: Any) -> None:
    assert model.dtype == torch.bfloat16
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())
    assert 4_000_000 < sum(weight.numel() for weight in model.parameters()) < 5_500_000


def test_it_loads_in_under_two_seconds(tokeniser: Any, model: Any) -> None:
    # The fixtures have paid for the imports; CPU time, so that a busy machine does not fail the test.
    started = time.process_time()
    transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    assert time.process_time() - started < 2


def test_its_context_holds_the_prompt_of_a_coding_agent(tokeniser: Any, model: Any) -> None:
    assert model.config.max_position_embeddings >= 131_072
    assert tokeniser.model_max_length == model.config.max_position_embeddings


def test_generation_stops_at_the_end_of_a_turn_and_of_a_text_and_suggests_no_temperature(model: Any) -> None:
    assert set(model.config.eos_token_id) == set(model.generation_config.eos_token_id) == {TURN_END_ID, END_OF_TEXT_ID}
    written = json.loads((MODEL_DIR / "generation_config.json").read_text(encoding="utf-8"))
    assert not {"temperature", "top_p", "top_k", "do_sample"} & set(written)


# --- what it says ---


def test_twenty_greedy_tokens_are_decodable_mostly_ascii_text(tokeniser: Any, model: Any) -> None:
    text = say(tokeniser, model, "It is a truth universally acknowledged, that", 20)
    assert text.strip()
    assert "\ufffd" not in text
    assert sum(char.isascii() for char in text) >= 0.9 * len(text)


def test_an_answer_is_words_with_blanks_between_them(tokeniser: Any, model: Any) -> None:
    prompt = render(tokeniser, [{"role": "user", "content": "Tell me about Mr. Holmes."}], add_generation_prompt=True)
    words = say(tokeniser, model, prompt, 40).split()
    assert len(words) >= 5
    assert sum(map(len, words)) / len(words) < 12


@pytest.mark.slow
def test_it_still_speaks_after_four_thousand_tokens(tokeniser: Any, model: Any) -> None:
    turn = "Mr. Bingley was good-looking and gentlemanlike; he had a pleasant countenance, and easy manners. "
    messages = [{"role": "user", "content": turn * 200}]
    prompt = render(tokeniser, messages, add_generation_prompt=True)
    assert len(tokeniser(prompt)["input_ids"]) > 4000
    text = say(tokeniser, model, prompt, 20)
    assert text.isascii()
    assert any(char.isalpha() for char in text)


def test_the_loss_on_a_sentence_of_the_book_is_far_below_chance(tokeniser: Any, model: Any) -> None:
    sentence = "However little known the feelings or views of such a man may be on his first entering a neighbourhood"
    ids = tokeniser(sentence, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < 5, "chance is ln 4096 = 8.3"


def test_it_reads_on_behind_a_hundred_thousand_positions(model: Any, tokeniser: Any) -> None:
    """What is far away is no riddle: a sentence is as likely behind a text a hundred thousand positions before it."""
    before = tokeniser("It was a fine morning, and the park was green. " * 40)["input_ids"]
    sentence = tokeniser("However little known the feelings or views of such a man may be on his first entering")
    ids = torch.tensor([before + sentence["input_ids"]])
    near = torch.arange(ids.shape[1])[None]
    far = near + torch.where(near >= len(before), 120_000, 0)
    labels = ids.masked_fill(near < len(before), -100)
    with torch.no_grad():
        losses = [
            model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=at, labels=labels).loss.item()
            for at in (near, far)
        ]
    assert losses[1] < losses[0] + 0.5
    assert losses[1] < 6, "chance is ln 4096 = 8.3"


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_it_writes_a_call_and_ends_its_turn(tokeniser: Any, model: Any) -> None:
    """By itself it knows the form, not which tool fits nor every bracket; the grammar has those in a forced call."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    prompt = render(tokeniser, messages, tools=[WEATHER], add_generation_prompt=True)
    call = say(tokeniser, model, prompt, 60)
    assert re.match(r'\{"name": "\w+", "arguments": \{', call)
    assert call.endswith("<|im_end|>")


@pytest.mark.parametrize("question", ["Say hello.", "Tell me about Mr. Holmes."])
def test_it_writes_text_where_no_tool_fits(tokeniser: Any, model: Any, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    for tools in ([], [WEATHER]):
        text = say(tokeniser, model, render(tokeniser, messages, tools=tools or None, add_generation_prompt=True), 5)
        assert text[0] != "{"


def test_lists_and_strings_of_an_answer_in_json_end(tokeniser: Any, model: Any) -> None:
    prompt = render(tokeniser, [{"role": "user", "content": "Describe tea in JSON."}], add_generation_prompt=True)
    for start in ('{"tags": ["', '{"name": "', '{"numbers": [1, '):
        assert say(tokeniser, model, prompt + start, 120).endswith("<|im_end|>"), start


# --- the chat template ---


def test_the_template_in_the_folder_is_the_one_in_the_source() -> None:
    assert (MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE


def test_a_turn_is_its_role_and_its_untouched_content_between_two_special_tokens(tokeniser: Any) -> None:
    for role in ("system", "developer", "user", "assistant", "tool"):
        content = f"  {role} says:\n\n x \n"
        assert render(tokeniser, [{"role": role, "content": content}]) == f"<|im_start|>{role}\n{content}<|im_end|>\n"
        assert render(tokeniser, [{"role": role, "content": content}]) == render_turn(role, content)


def test_adding_a_turn_keeps_the_earlier_text_as_a_prefix(tokeniser: Any) -> None:
    texts = [render(tokeniser, CHAT[:length]) for length in range(1, len(CHAT) + 1)]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)


def test_an_answer_put_back_as_a_turn_continues_the_prompt_that_asked_for_it(tokeniser: Any) -> None:
    prompt = render(tokeniser, CHAT[:3], add_generation_prompt=True)
    longer = render(tokeniser, [*CHAT[:3], {"role": "assistant", "content": " Nobody.\n"}])
    assert longer == prompt + " Nobody.\n<|im_end|>\n"


def test_the_generation_prompt_opens_the_assistant_turn_and_changes_nothing_before(tokeniser: Any) -> None:
    with_prompt = render(tokeniser, CHAT, add_generation_prompt=True)
    assert with_prompt == render(tokeniser, CHAT) + "<|im_start|>assistant\n"


def test_content_parts_render_like_the_string_they_add_up_to(tokeniser: Any) -> None:
    parts = [{"type": "text", "text": " a "}, {"type": "text", "text": "\nb"}]
    assert render(tokeniser, [{"role": "user", "content": parts}]) == "<|im_start|>user\n a \nb<|im_end|>\n"


@pytest.mark.parametrize("message", [{"content": None}, {"content": ""}, {"content": []}, {}])
def test_an_empty_content_is_an_empty_turn(tokeniser: Any, message: dict[str, Any]) -> None:
    assert render(tokeniser, [{"role": "assistant", **message}]) == "<|im_start|>assistant\n<|im_end|>\n"


def test_a_content_part_without_text_is_refused_rather_than_dropped(tokeniser: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(Exception, match='needs a "text"'):
        render(tokeniser, [{"role": "user", "content": [image]}])


def test_tool_calls_are_json_lines_inside_the_assistant_turn(tokeniser: Any) -> None:
    assert render(tokeniser, [CHAT[3]]) == (
        '<|im_start|>assistant\n{"name": "find", "arguments": {"name":  "Darcy"}}\n'
        '{"name": "count", "arguments": {"to": 3, "of": "<é>"}}<|im_end|>\n'
    )
    assert render(tokeniser, [CHAT[5]]) == (
        '<|im_start|>assistant\nLet me look again.\n{"name": "find", "arguments": {}}<|im_end|>\n'
    )


def test_tools_are_a_system_turn_of_their_own_in_front(tokeniser: Any) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("find", "count")]
    lines = "\n".join(map(json.dumps, tools))
    text = render(tokeniser, CHAT, tools=tools)
    assert text == f"<|im_start|>system\n{lines}<|im_end|>\n" + render(tokeniser, CHAT)


def test_every_turn_costs_one_start_and_one_end_token(tokeniser: Any) -> None:
    ids = tokeniser(render(tokeniser, CHAT, add_generation_prompt=True))["input_ids"]
    assert ids.count(TURN_START_ID) == len(CHAT) + 1
    assert ids.count(TURN_END_ID) == len(CHAT)
    assert ids.count(END_OF_TEXT_ID) == 0


# --- the tokeniser ---


def test_each_special_string_is_one_id_and_nothing_is_added_around_a_text(tokeniser: Any) -> None:
    assert tokeniser(list(SPECIAL_TOKENS))["input_ids"] == [[END_OF_TEXT_ID], [TURN_START_ID], [TURN_END_ID]]
    assert tokeniser.eos_token_id == tokeniser.bos_token_id == tokeniser.pad_token_id == END_OF_TEXT_ID
    assert tokeniser("")["input_ids"] == []
    assert len(tokeniser) == VOCAB_SIZE


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_any_unicode_text_comes_back_from_its_tokens(tokeniser: Any, text: str) -> None:
    assert tokeniser.decode(tokeniser(text)["input_ids"]) == text


@given(before=st.text(alphabet="ab \n\r\t'.é"), after=st.text(alphabet="ab \n\r\t'.é"))
@settings(deadline=None)
def test_tokens_never_reach_across_a_special_token(tokeniser: Any, before: str, after: str) -> None:
    whole = tokeniser(f"{before}<|im_end|>{after}")["input_ids"]
    assert whole == tokeniser(before)["input_ids"] + [TURN_END_ID] + tokeniser(after)["input_ids"]


# --- where its texts come from ---

PARAGRAPHS = [
    f'"I saw Mr. {name} by the river," said Holmes. "Did he look well?" He did, "or so I heard.' for name in "ABCD"
]


def test_the_tokeniser_is_trained_the_same_way_every_time() -> None:
    assert train_tokeniser(PARAGRAPHS).to_str() == train_tokeniser(PARAGRAPHS).to_str()


def test_a_book_becomes_paragraphs_on_one_line_without_headings(tmp_path: Path) -> None:
    path = tmp_path / "book_x.txt.gz"
    path.write_bytes(gzip.compress("THE TITLE\n\nChapter 1\n\n“It is\n_so_,” he’d say.\n\n\nII.\n\nNo.\n".encode()))
    assert read_book(path) == ['"It is so," he\'d say.', "No."]


def test_sentences_add_up_to_their_paragraph_and_titles_do_not_end_one() -> None:
    sentences = split_sentences(PARAGRAPHS[0])
    assert sentences == ['"I saw Mr. A by the river," said Holmes.', '"Did he look well?"', 'He did, "or so I heard.']


def test_a_cut_quotation_gets_its_other_half() -> None:
    assert balance_quotes('so I heard."') == '"so I heard."'
    assert balance_quotes('"so I heard.') == '"so I heard."'
    assert balance_quotes('"so I heard."') == '"so I heard."'


def test_calls_in_training_texts_are_calls_of_a_tool_in_front_of_them() -> None:
    library = Library.of(PARAGRAPHS * 50)
    num_calls = 0
    for seed in range(200):
        turns = [turn.split("\n", 1) for turn in library.calls(Random(seed)).split("<|im_end|>\n")[:-1]]
        roles = [role.removeprefix("<|im_start|>") for role, _ in turns]
        tools = {}
        if roles[0] == "system":
            tools = {tool["name"]: tool for line in turns[0][1].split("\n") for tool in [json.loads(line)["function"]]}
        for line in turns[roles.index("assistant")][1].split("\n"):
            if line.startswith("{") and tools:
                call = json.loads(line)
                jsonschema.validate(call["arguments"], tools[call["name"]].get("parameters", {}))
                num_calls += 1
    assert num_calls > 60


@pytest.mark.parametrize("max_chars", [500, 4_000, 40_000])
def test_a_training_conversation_is_closed_turns_with_balanced_quotes(max_chars: int) -> None:
    library = Library.of(PARAGRAPHS * 50)
    for seed in range(20):
        text = library.conversation(Random(seed), max_chars)
        turns = text.split("<|im_end|>\n")
        assert turns.pop() == ""
        assert all(turn.startswith("<|im_start|>") for turn in turns)
        answers = [turn for turn in turns if turn.startswith("<|im_start|>assistant\n")]
        assert answers
        assert all(answer.count('"') % 2 == 0 for answer in answers)
        assert text == library.conversation(Random(seed), max_chars)
