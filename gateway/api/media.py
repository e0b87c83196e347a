"""Images, files and sounds in requests, in all dialects: their bytes in base64, or a public URL, for types.Media. Pure;
nothing is fetched, and of what type the bytes are is what the client says.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from mimetypes import MimeTypes
from typing import Final, Literal, NamedTuple
from urllib.parse import urlsplit

from gateway.api.fields import invalid, shown, unsupported
from gateway.errors import BadRequestError
from gateway.types import Media

Kind = Literal["image", "file", "audio", "video"]

MAX_URL_CHARS: Final = 8192

_MIME_TYPE: Final = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,126}/[a-z0-9][a-z0-9!#$&^_.+-]{0,126}")
_URL: Final = re.compile(r"https?://[^\s/?#]+[^\s]*", re.IGNORECASE)
_DATA: Final = "data:"
_STANDARD: Final = str.maketrans("-_", "+/")
_KINDS: Final[Mapping[str, Kind]] = {"image": "image", "audio": "audio", "video": "video"}
_KNOWN_TYPES: Final = MimeTypes()
_KNOWN_TYPES.add_type("image/webp", ".webp")


class Content(NamedTuple):
    """Bytes, or where they are. Fields as in Media."""

    mime_type: str = ""
    data: str = ""
    url: str = ""


def content_of_url(written: str, path: str) -> Content:
    """Of a data: URL, or of a public one. Raises BadRequestError for any other."""
    if written[: len(_DATA)].lower() == _DATA:
        head, comma, data = written[len(_DATA) :].partition(",")
        mime_type, *parameters = head.split(";")
        if not comma or "base64" not in map(str.lower, parameters):
            raise invalid(path, "a data URL is expected to be `data:TYPE;base64,DATA`")
        return content_of_base64(data, mime_type, path, path)
    return public_url(written, path)


def public_url(written: str, path: str) -> Content:
    """Raises BadRequestError for what is no URL with http or https."""
    if len(written) > MAX_URL_CHARS or not _URL.fullmatch(written):
        raise invalid(path, f"a URL with http or https, and at most {MAX_URL_CHARS} characters, is expected")
    return Content(type_of_name(urlsplit(written).path), url=written)


def content_of_base64(written: str, mime_type: str, path: str, type_path: str) -> Content:
    """Of bytes; both alphabets are taken, with padding or without. Raises BadRequestError for what is no base64, for
    nothing at all, and for what is no media type."""
    data = written.translate(_STANDARD) if "-" in written or "_" in written else written
    data += "=" * (-len(data) % 4)
    try:
        empty = not binascii.a2b_base64(data, strict_mode=True)
    except ValueError:
        raise invalid(path, "it is no base64") from None
    if empty:
        raise invalid(path, "it is empty")
    return Content(checked_type(mime_type, type_path), data)


def checked_type(written: str, path: str) -> str:
    """A media type in lower case, without parameters."""
    mime_type = written.partition(";")[0].strip().lower()
    if not _MIME_TYPE.fullmatch(mime_type):
        raise invalid(path, f"'{shown(written)}' is no media type")
    return mime_type


def type_of_name(name: str) -> str:
    """What the ending of a file's name says; empty where it says nothing, or that the file is packed."""
    mime_type, packed = _KNOWN_TYPES.guess_type(name, strict=False)
    return mime_type if mime_type and not packed else ""


def kind_of(mime_type: str) -> Kind:
    return _KINDS.get(mime_type.partition("/")[0], "file")


def refusal(media: Media) -> BadRequestError:
    """The error where only text is read."""
    return unsupported(media.path, media.refusal)
