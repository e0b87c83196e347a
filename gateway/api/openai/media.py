"""Parts of chats and responses that are no text: images, files and sounds. Pure.

Chats and responses name the same things differently: `image_url` and `input_image`, `file` and `input_file`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.api.fields import Check, choice, invalid, missing, record, text
from gateway.api.media import Content, content_of_base64, content_of_url, kind_of, type_of_name
from gateway.errors import BadRequestError, UnsupportedError
from gateway.types import Media

_string: Final = text()
_detail: Final = choice("auto", "low", "high", "original")
_SOUNDS: Final = {"wav": "audio/wav", "mp3": "audio/mpeg"}
_NAMES: Final = {
    **dict.fromkeys(("image_url", "input_image"), "Images"),
    **dict.fromkeys(("file", "input_file"), "Files"),
    "input_audio": "Audio",
}


def chat_media(**marks: Check[Any]) -> dict[str, Check[dict[str, Any]]]:
    """Parts of a chat, by type. `marks` are the fields that all parts have."""
    image = record("url", url=_string, detail=_detail)
    file = record(file_data=_string, file_id=_string, filename=_string)
    sound = record("data", "format", data=_string, format=choice(*_SOUNDS))
    return {
        "image_url": record("image_url", image_url=image, **marks),
        "file": record("file", file=file, **marks),
        "input_audio": record("input_audio", input_audio=sound, **marks),
    }


def response_media(**marks: Check[Any]) -> dict[str, Check[dict[str, Any]]]:
    """The same of a response."""
    named = {"file_id": _string, "detail": _detail, **marks}
    file = {"file_data": _string, "file_url": _string, "filename": _string}
    return {
        "input_image": record(image_url=_string, **named),
        "input_file": record(**file, **named),
    }


def no_media(kind: str, path: str) -> BadRequestError | None:
    """The error for a part where only texts may be; None for a type that does not exist."""
    if kind not in _NAMES:
        return None
    return UnsupportedError(_refusal(kind), param=f"{path}.type")


def find_media(part: Mapping[str, Any], path: str, message: int, chars: int) -> Media | None:
    """What a checked part is, behind so many characters of a message; None for a text. Raises BadRequestError for what
    is no base64, no URL, or nothing."""
    kind = part["type"]
    if kind not in _NAMES:
        return None
    inside, where = part.get(kind, part), f"{path}.{kind}" if kind in part else path
    content = _content(kind, inside, where)
    return Media(
        kind="image" if kind in ("image_url", "input_image") else "audio" if kind == "input_audio" else "file",
        path=f"{path}.type",
        refusal=_refusal(kind),
        mime_type=content.mime_type,
        data=content.data,
        url=content.url,
        name=inside.get("filename", ""),
        detail="" if (detail := inside.get("detail", "auto")) == "auto" else detail,
        message=message,
        chars=chars,
    )


def _content(kind: str, inside: Mapping[str, Any], path: str) -> Content:
    """`inside` is the object with the fields of the media. Nothing, where it names an uploaded file."""
    if kind == "input_audio":
        sound = _SOUNDS[inside["format"]]
        return content_of_base64(inside["data"], sound, f"{path}.data", f"{path}.format")
    name = "url" if kind == "image_url" else "image_url" if kind == "input_image" else "file_data"
    if (written := inside.get(name)) is None:
        if (url := inside.get("file_url")) is not None:
            return content_of_url(url, f"{path}.file_url")
        if inside.get("file_id") is None:
            raise missing(f"{path}.{name}")
        return Content()
    if name == "file_data" and not written.startswith("data:"):
        file_type = type_of_name(inside.get("filename", "")) or "application/pdf"
        return content_of_base64(written, file_type, f"{path}.file_data", f"{path}.filename")
    content = content_of_url(written, f"{path}.{name}")
    if name == "file_data" and content.url:
        raise invalid(f"{path}.{name}", "the file's bytes are expected, in base64")
    if name != "file_data" and kind_of(content.mime_type) != "image":
        if content.data:
            raise invalid(f"{path}.{name}", f"an image is expected, and {content.mime_type} is none")
        return content._replace(mime_type="")  # `photo.php` may be one
    return content


def _refusal(kind: str) -> str:
    return f"{_NAMES[kind]} are not supported by this model."
