"""Images, files and sounds as each client writes them: what upstreams are given, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.api.media import MAX_URL_CHARS, content_of_base64, content_of_url, public_url
from gateway.errors import BadRequestError, UnsupportedError
from gateway.types import ChatPrompt
from tests.fakes.client_fields import CLIENTS, MEDIA, PAPER, PDF, PICTURE, PNG, request_of, result_with, with_parts
from tests.fakes.gateway import running
from tests.fakes.stages import ScriptedEngine, Stages, request, walk

WHAT: dict[str, dict[str, Any]] = {
    "image": {"kind": "image", "mime_type": "image/png", "data": PNG},
    "image URL": {"kind": "image", "mime_type": "image/png", "url": PICTURE},
    "file": {"kind": "file", "mime_type": "application/pdf", "data": PDF},
    "file URL": {"kind": "file", "mime_type": "application/pdf", "url": PAPER},
    "audio": {"kind": "audio", "mime_type": "audio/wav", "data": "UklGRg=="},
    "video": {"kind": "video", "mime_type": "video/mp4", "data": "AAAA"},
}
TEXT: dict[str, Any] = {
    "openai": lambda text: {"type": "text", "text": text},
    "responses": lambda text: {"type": "input_text", "text": text},
    "anthropic": lambda text: {"type": "text", "text": text},
    "gemini": lambda text: {"text": text},
}


def prompt_of(client: str, fields: Any) -> ChatPrompt:
    prompt = request_of(client, fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


@pytest.mark.parametrize(("client", "name"), [(client, name) for client, parts in MEDIA.items() for name in parts])
def test_every_client_says_the_same_in_its_own_words(client: str, name: str) -> None:
    (media,) = prompt_of(client, with_parts(client, MEDIA[client][name])).media
    assert {field: getattr(media, field) for field in WHAT[name]} == WHAT[name]
    assert (media.message, media.chars, media.data == "") == (0, 0, "URL" in name)


@pytest.mark.parametrize("client", CLIENTS)
def test_texts_are_joined_and_media_know_their_places(client: str) -> None:
    text, image = TEXT[client], MEDIA[client]["image"]
    prompt = prompt_of(client, with_parts(client, text("ab"), image, text("c"), image, image))
    assert [message["content"] for message in prompt.messages] == ["abc"]
    assert [(one.message, one.chars) for one in prompt.media] == [(0, 2), (0, 3), (0, 3)]


@pytest.mark.parametrize("client", ["responses", "anthropic", "gemini"])
def test_results_of_tools_have_media(client: str) -> None:
    text = [] if client == "gemini" else [TEXT[client]("sun")]
    prompt = prompt_of(client, result_with(client, *text, MEDIA[client]["image"]))
    (media,), last = prompt.media, prompt.messages[-1]
    assert (last["role"], media.message, media.chars) == ("tool", len(prompt.messages) - 1, len(last["content"]))


def test_breakpoints_know_what_they_are_behind() -> None:
    point = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    image = MEDIA["openai"]["image"]
    prompt = prompt_of("openai", with_parts("openai", TEXT["openai"]("ab") | point, image, image | point))
    assert [(one.chars, one.media) for one in prompt.markers] == [(2, 0), (2, 2)]
    control = {"cache_control": {"type": "ephemeral"}}
    picture = MEDIA["anthropic"]["image"]
    marked = prompt_of("anthropic", with_parts("anthropic", TEXT["anthropic"]("ab") | control, picture | control))
    assert [(one.chars, one.media) for one in marked.markers] == [(2, 0), (2, 1)]
    (result,) = prompt_of(
        "anthropic", with_parts("anthropic", picture) | {"cache_control": control["cache_control"]}
    ).markers
    assert (result.chars, result.media) == (0, 1)


def test_details_and_names_are_kept() -> None:
    image = {"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}}
    assert [one.detail for one in prompt_of("openai", with_parts("openai", image)).media] == ["low"]
    item = {"type": "input_image", "image_url": PICTURE, "detail": "auto"}
    assert [one.detail for one in prompt_of("responses", with_parts("responses", item)).media] == [""]
    (file,) = prompt_of("openai", with_parts("openai", MEDIA["openai"]["file"])).media
    assert file.name == "a.pdf"


def test_a_documents_title_and_context_are_texts_before_it() -> None:
    paper = {**MEDIA["anthropic"]["file"], "title": "Waves", "context": "Of 1801."}
    prompt = prompt_of("anthropic", with_parts("anthropic", TEXT["anthropic"]("See: "), paper))
    assert prompt.messages[0]["content"] == "See: Waves\nOf 1801.\n"
    assert [(one.name, one.chars) for one in prompt.media] == [("Waves", 20)]
    failed = {"is_error": True, "type": "tool_result", "tool_use_id": "c1", "content": [MEDIA["anthropic"]["image"]]}
    body = result_with("anthropic")
    body["messages"][-1]["content"] = [failed]
    (image,) = prompt_of("anthropic", body).media
    assert image.chars == len("Error")


@pytest.mark.parametrize(
    ("filename", "mime_type"), [("a.pdf", "application/pdf"), ("a.csv", "text/csv"), ("a", "application/pdf")]
)
def test_bytes_without_a_type_are_what_the_name_says(filename: str, mime_type: str) -> None:
    file = {"type": "file", "file": {"filename": filename, "file_data": PDF}}
    assert [one.mime_type for one in prompt_of("openai", with_parts("openai", file)).media] == [mime_type]


def test_base64_of_both_alphabets_becomes_one() -> None:
    for written in ("-_--", "+/++"):
        assert content_of_base64(written, "Image/PNG; q=1", "p", "t") == ("image/png", "+/++", "")
    assert content_of_base64("AA", "a/b", "p", "t").data == "AA=="
    assert content_of_url("DATA:image/png;charset=x;BASE64,AAAA", "p") == ("image/png", "AAAA", "")


@pytest.mark.parametrize("written", ["", "A", "AA\nAA", "A===", "AAA=A", "é", "====", "AA=="[:3] + "A="])
def test_what_is_no_base64_is_refused(written: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        content_of_base64(written, "image/png", "path", "type")
    assert refused.value.param == "path"


@pytest.mark.parametrize("written", ["png", "", "image/", "/png", "image/p ng", "image/png/x", "x" * 300 + "/y"])
def test_what_is_no_media_type_is_refused(written: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        content_of_base64("AAAA", written, "path", "type")
    assert refused.value.param == "type"


@pytest.mark.parametrize(
    "url",
    [
        *("", "a.png", "ftp://a/b", "file:///etc/passwd", "http://", "https://a b", "data:,x", "data:image/png,AAAA"),
        "https://a/" + "b" * MAX_URL_CHARS,
    ],
)
def test_what_is_no_public_url_is_refused(url: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        content_of_url(url, "path")
    assert refused.value.param == "path"
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("url", "mime_type"),
    [
        ("https://a.org/b.PDF?c=d#e", "application/pdf"),
        ("https://a.org/b.webp", "image/webp"),
        ("https://a.org", ""),
        ("https://a.org/b.tar.gz", ""),
        ("https://a.org/b?c=d.png", ""),
    ],
)
def test_a_url_tells_its_type_by_its_ending(url: str, mime_type: str) -> None:
    assert public_url(url, "path").mime_type == mime_type


BROKEN: list[tuple[str, Any, str]] = [
    ("openai", {"type": "image_url", "image_url": {"url": "x"}}, "messages[0].content[0].image_url.url"),
    ("openai", {"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url.url"),
    ("openai", {"type": "image_url"}, "messages[0].content[0].image_url"),
    (
        "openai",
        {"type": "image_url", "image_url": {"url": "data:application/pdf;base64,AAAA"}},
        "messages[0].content[0].image_url.url",
    ),
    ("openai", {"type": "file", "file": {}}, "messages[0].content[0].file.file_data"),
    ("openai", {"type": "file", "file": {"file_data": "https://a.org/b"}}, "messages[0].content[0].file.file_data"),
    (
        "openai",
        {"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}},
        "messages[0].content[0].input_audio.data",
    ),
    ("responses", {"type": "input_image"}, "input[0].content[0].image_url"),
    ("responses", {"type": "input_file", "file_url": "b"}, "input[0].content[0].file_url"),
    ("gemini", {"inlineData": {"mimeType": "image/png"}}, "contents[0].parts[0].inlineData.data"),
    ("gemini", {"inlineData": {"data": "AAAA"}}, "contents[0].parts[0].inlineData.mimeType"),
    ("gemini", {"inline_data": {"mime_type": "x", "data": "AAAA"}}, "contents[0].parts[0].inlineData.mimeType"),
    ("gemini", {"fileData": {"fileUri": "gs://a/b"}}, "contents[0].parts[0].fileData.fileUri"),
    ("gemini", {"fileData": {"fileUri": "https://a.org/b"}}, "contents[0].parts[0].fileData.mimeType"),
]


@pytest.mark.parametrize(("client", "part", "path"), BROKEN)
def test_what_is_broken_is_named_by_its_path(client: str, part: Any, path: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        request_of(client, with_parts(client, part))
    assert refused.value.param == path


def test_a_model_says_nothing_in_pictures() -> None:
    turn = {"role": "model", "parts": [MEDIA["gemini"]["image"]]}
    for body in ({"contents": [turn]}, {"systemInstruction": turn}):
        with pytest.raises(BadRequestError, match="Only text is understood"):
            request_of("gemini", body)


ROUTES = {
    "openai": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/demo:generateContent",
}
REFUSED = {
    ("openai", "image"): "Images are not supported by this model.",
    ("openai", "file"): "Files are not supported by this model.",
    ("openai", "audio"): "Audio are not supported by this model.",
    ("responses", "image"): "Images are not supported by this model.",
    ("responses", "file"): "Files are not supported by this model.",
    ("anthropic", "image"): "messages.0.content.0: Images are not supported by this model.",
    ("anthropic", "file"): "messages.0.content.0.source: Only documents of plain text are supported, with a source of "
    "type text or content.",
    ("gemini", "image"): "Unsupported field 'contents[0].parts[0].inlineData'. Only text is understood by this model.",
}


OWN = {
    "openai": {"model": "demo"},
    "responses": {"model": "demo", "background": True},
    "anthropic": {"model": "demo", "max_tokens": 9},
    "gemini": {},
}


async def test_models_of_engines_read_text_alone() -> None:
    async with running() as gateway:
        for (client, name), told in REFUSED.items():
            body = OWN[client] | with_parts(client, MEDIA[client][name])
            headers = {"anthropic-version": "2023-06-01"} if client == "anthropic" else {}
            status, answer, _ = await gateway.post(ROUTES[client], body, headers=headers)
            assert (status, answer["error"]["message"]) == (400, told)
            if client in ("openai", "responses"):
                path = f"{'messages' if client == 'openai' else 'input'}[0].content[0].type"
                assert (answer["error"]["param"], answer["error"]["code"]) == (path, "unsupported_parameter")
        assert not gateway.pipeline.requests


async def test_the_way_to_engines_gives_templates_no_image() -> None:
    stages = Stages([ScriptedEngine("e", [])])
    asked = replace(request(), prompt=prompt_of("openai", with_parts("openai", MEDIA["openai"]["image"])))
    for use in (stages.pipeline().count(asked), walk(stages, asked)):
        with pytest.raises(UnsupportedError, match="Images are not supported"):
            await use
