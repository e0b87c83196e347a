"""Images, files and sounds as each form writes them, in bodies that the SDKs' own types take."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import UnsupportedError
from gateway.types import Marker, Media, Request
from gateway.upstreams.translation.base import pieces
from tests.fakes.api_rules import CHECKS
from tests.fakes.client_fields import CLIENTS
from tests.fakes.translated import call, chat, image, result, said, user

PDF = {"kind": "file", "mime_type": "application/pdf", "data": "JVBE"}
NOTES = {"kind": "file", "mime_type": "text/markdown", "data": "I8OFCg=="}  # of "#Å\n"
PICTURE = {"url": "https://a.org/b.png", "mime_type": "image/png"}
PAPER = {"kind": "file", "mime_type": "application/pdf", "url": "https://a.org/b.pdf"}
WAV = {"kind": "audio", "mime_type": "audio/x-wav", "data": "UklG"}


def body_of(form: str, request: Request) -> Any:
    body = orjson.loads(orjson.dumps(CLIENTS[form].write(request, "gpt-5.6").body))
    CHECKS[form](body)
    return body


def written(form: str, media: Media) -> Any:
    """A message of this and nothing else."""
    body = body_of(form, chat(user(""), media=(media,)))
    (turn,) = body.get("messages", body.get("input", body.get("contents")))
    (part,) = turn.get("content", turn.get("parts"))
    return part


def url(mime_type: str, data: str) -> str:
    return f"data:{mime_type};base64,{data}"


WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an image": (
        {},
        {
            "openai": {"type": "image_url", "image_url": {"url": url("image/png", "iVBO")}},
            "responses": {"type": "input_image", "detail": "auto", "image_url": url("image/png", "iVBO")},
            "anthropic": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}},
            "gemini": {"inlineData": {"mimeType": "image/png", "data": "iVBO"}},
        },
    ),
    "an image with a detail": (
        {"detail": "low", **PICTURE},
        {
            "openai": {"type": "image_url", "image_url": {"url": PICTURE["url"], "detail": "low"}},
            "responses": {"type": "input_image", "detail": "low", "image_url": PICTURE["url"]},
            "anthropic": {"type": "image", "source": {"type": "url", "url": PICTURE["url"]}},
            "gemini": {"fileData": {"mimeType": "image/png", "fileUri": PICTURE["url"]}},
        },
    ),
    "an image of some type": (
        {"url": "https://a.org/b"},
        {
            "openai": {"type": "image_url", "image_url": {"url": "https://a.org/b"}},
            "responses": {"type": "input_image", "detail": "auto", "image_url": "https://a.org/b"},
            "anthropic": {"type": "image", "source": {"type": "url", "url": "https://a.org/b"}},
            "gemini": "image by URL",
        },
    ),
    "a file": (
        {**PDF, "name": "Waves"},
        {
            "openai": {"type": "file", "file": {"filename": "Waves", "file_data": url("application/pdf", "JVBE")}},
            "responses": {"type": "input_file", "filename": "Waves", "file_data": url("application/pdf", "JVBE")},
            "anthropic": {
                "type": "document",
                "title": "Waves",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"},
            },
            "gemini": {"inlineData": {"mimeType": "application/pdf", "data": "JVBE"}},
        },
    ),
    "a file without a name": (
        PDF,
        {
            "openai": {"type": "file", "file": {"filename": "file.pdf", "file_data": url("application/pdf", "JVBE")}},
            "anthropic": {
                "type": "document",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"},
            },
        },
    ),
    "a file by URL": (
        PAPER,
        {
            "openai": "files by URL",
            "responses": {"type": "input_file", "file_url": PAPER["url"]},
            "anthropic": {"type": "document", "source": {"type": "url", "url": PAPER["url"]}},
            "gemini": {"fileData": {"mimeType": "application/pdf", "fileUri": PAPER["url"]}},
        },
    ),
    "a file of text": (
        {**NOTES, "name": "n"},
        {
            "openai": {"type": "text", "text": "#Å\n"},
            "responses": {"type": "input_file", "filename": "n", "file_data": url("text/markdown", "I8OFCg==")},
            "anthropic": {
                "type": "document",
                "title": "n",
                "source": {"type": "text", "media_type": "text/plain", "data": "#Å\n"},
            },
            "gemini": {"inlineData": {"mimeType": "text/markdown", "data": "I8OFCg=="}},
        },
    ),
    "a sound": (
        WAV,
        {
            "openai": {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
            "responses": "sounds",
            "anthropic": "sounds",
            "gemini": {"inlineData": {"mimeType": "audio/x-wav", "data": "UklG"}},
        },
    ),
    "a sound by URL": (
        {**WAV, "data": "", "url": "https://a.org/b.wav"},
        {"openai": "audio of type audio/x-wav by URL"},
    ),
    "a film": (
        {"kind": "video", "mime_type": "video/mp4", "data": "AAAA"},
        dict.fromkeys(CLIENTS, "films"),
    ),
    "an image that few can read": (
        {"mime_type": "image/heic", "data": "AAAA"},
        {
            **dict.fromkeys(("openai", "responses", "anthropic"), "image of type image/heic"),
            "gemini": {"inlineData": {"mimeType": "image/heic", "data": "AAAA"}},
        },
    ),
    "a picture that Gemini cannot read": ({"mime_type": "image/gif"}, {"gemini": "image of type image/gif"}),
    "a file that is no text": ({**NOTES, "data": "/w=="}, {"openai": "text/markdown", "anthropic": "text/markdown"}),
    "a file of another kind": (
        {"kind": "file", "mime_type": "application/zip", "data": "UEsD"},
        dict.fromkeys(CLIENTS, "file of type application/zip"),
    ),
    "an uploaded file": ({"mime_type": "", "data": ""}, dict.fromkeys(CLIENTS, "file of this id")),
    "a file of another tenant at Google": (
        {**PAPER, "url": "https://generativelanguage.googleapis.com/v1beta/files/abc"},
        {"gemini": "file of type application/pdf by URL"},
    ),
}


@pytest.mark.parametrize(
    ("fields", "form", "expected"),
    [(fields, form, one) for fields, by_form in WRITTEN.values() for form, one in by_form.items()],
    ids=[f"{what}-{form}" for what, (_, by_form) in WRITTEN.items() for form in by_form],
)
def test_media_are_written_as_the_api_has_them(fields: Any, form: str, expected: Any) -> None:
    media = image(0, **fields)
    if not isinstance(expected, str):
        assert written(form, media) == expected
        return
    with pytest.raises(UnsupportedError, match=expected) as refused:
        written(form, media)
    assert refused.value.param == "p"
    assert CLIENTS[form].title in refused.value.message


def test_results_have_media_where_the_api_has_that() -> None:
    def asked(**fields: Any) -> Request:
        messages = user("u"), said("", call("f", {}, "c1")), result("sun", "c1")
        return chat(*messages, media=(image(3, 2, **fields),))

    assert body_of("responses", asked())["input"][-1]["output"] == [
        {"type": "input_text", "text": "sun"},
        {"type": "input_image", "detail": "auto", "image_url": url("image/png", "iVBO")},
    ]
    assert body_of("anthropic", asked())["messages"][-1]["content"][0]["content"] == [
        {"type": "text", "text": "sun"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}},
    ]
    (part,) = body_of("gemini", asked())["contents"][-1]["parts"]
    assert part["functionResponse"]["response"] == {"output": "sun"}
    assert part["functionResponse"]["parts"] == [{"inlineData": {"mimeType": "image/png", "data": "iVBO"}}]
    for form, request in (("openai", asked()), ("gemini", asked(**PICTURE))):
        with pytest.raises(UnsupportedError, match="in results of tools"):
            body_of(form, request)


def test_breakpoints_are_behind_the_media_that_they_mark() -> None:
    media = (image(2), image(2), image(3))
    hour = 3600.0
    marks = (Marker(0, 2, hour), Marker(0, 2, hour, media=2), Marker(0, 3, hour, media=3))
    for form, field in (
        ("anthropic", "cache_control"),
        ("openai", "prompt_cache_breakpoint"),
        ("responses", "prompt_cache_breakpoint"),
    ):
        body = body_of(form, chat(user("abcd"), media=media, markers=marks))
        parts = body.get("messages", body.get("input"))[0]["content"]
        assert [(part.get("text", "*"), field in part) for part in parts] == [
            ("ab", True),
            ("*", False),
            ("*", True),
            ("c", False),
            ("*", True),
            ("d", False),
        ]
    (part,) = body_of("anthropic", chat(user(""), media=(image(0),), markers=(Marker(0, 0, hour, media=1),)))[
        "messages"
    ]
    assert "cache_control" in part["content"][0]


@given(
    st.text(max_size=8),
    st.lists(st.integers(0, 8), max_size=4),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=4),
)
def test_pieces_are_the_text_and_the_media_in_their_order(text: str, places: Any, cuts: Any) -> None:
    media = [image(min(place, len(text)), data=str(number)) for number, place in enumerate(sorted(places))]
    chars, num_media = 0, 0
    for piece, place in pieces(text, media, cuts):
        if isinstance(piece, str):
            assert piece == text[chars : chars + len(piece)] != ""
            chars += len(piece)
        else:
            assert piece is media[num_media]
            assert piece.chars == chars
            num_media += 1
        assert place == (chars, num_media)
    assert (chars, num_media) == (len(text), len(media))


def test_a_cached_prefix_of_gemini_ends_behind_the_media_that_it_has() -> None:
    media = (image(2), image(2, data="AAAA"), image(3, data="AAAB"))
    request = chat(user("abcd"), media=media, markers=(Marker(0, 2, 300.0, media=1), Marker(0, 3, 300.0, media=2)))
    contents = body_of("gemini", request)["contents"]
    data = [[one.get("text") or one["inlineData"]["data"] for one in content["parts"]] for content in contents]
    assert data == [["ab", "iVBO"], ["AAAA", "c"], ["AAAB", "d"]]
