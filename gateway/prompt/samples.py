"""Texts on which two ways to tokenise are compared when a model is loaded: chosen to be awkward, the same every time.

SAMPLES are single texts; class_samples() covers every Unicode category at both ends of each of its runs.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

_WHITESPACE: Final = [
    "",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    " \n ",
    "\r\n",
    "\r\n\r\n",
    "\t",
    "\t\tx",
    " \u00a0 ",
    "\u2003\u3000",
    "\u200b",
    "\u0085x",
    "a  b   c    d",
    " leading",
    "trailing ",
    "both  ",
    "x \n\n  y",
    "\n    indented\n\tcode\n",
    "end\r",
    "\x0b\x0c\x1c\x1d a",
]
_WORDS: Final = [
    "Hello, world! How are you?",
    "I'm you're he'll WE'VE they'D 's 'S 'ſ ''s don't 'tis I'LLx",
    "naïve café Zürich ß ﬁ ŉ",
    "snake_case camelCase kebab-case __dunder__ $var @user #tag",
    "0 1 12 123 1234 1234567890 3.14 1e-9 0xFF ½ Ⅷ ٣٤ 1,000,000",
    "a1b2c3 4x4 x86_64 v1.2.3-rc1",
    "=== --- ... !!! ??? <<>> {}[]() \\\\ /// |||",
    "https://example.org/a?b=c&d=%20#e",
    'def f(x):\n    return {"a": [1, 2, None]}\n\n\n# end',
    '{"name": "f", "arguments": {"x": "\\u00e9\\n"}}',
    "<b>bold</b> &amp; </s> <s>",
]
_SCRIPTS: Final = [
    "你好，世界。这是一个测试：１２３",
    "日本語のテキストとカタカナ、ｶﾀｶﾅ",
    "한국어 문장입니다. 각 각",
    "Привет, мир! Ёлка",
    "Καλημέρα ΣΊΣΥΦΟΣ",
    "مرحبا بالعالم ١٢٣",
    "שָׁלוֹם עוֹלָם",
    "हिन्दी में नमस्ते क्षि",
    "สวัสดีชาวโลก",
    "mixedキリルрусскийالعربية123",
    "ᚠᛇᚻ 𐎀𐎁 𝔘𝔫𝔦 ℌ",
]
_MARKS_AND_SYMBOLS: Final = [
    "e\u0301 é a\u0328\u0301 a\u0301\u0328 \u1100\u1161\u11a8 \uac01 \u212b \u2126 \u0344",
    "🙂 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️",
    "∀x∈ℝ: ⌈x⌉ ≠ ∑ → ⇒",
    "\x00\x01\x02\x1f\x7f\x80\x9f",
    "\ufeffbom \ufffd \ufffe \uffff",
    "\U0010ffff\U000e0001 \ue000\uf8ff",
    "\u202eright\u202c \u2066x\u2069",
]


def _random_texts(count: int) -> list[str]:
    rng = random.Random(20240229)  # noqa: S311 - the same texts every time
    pools = ["ab ", " \n\t\r", "aA1 .,'", "".join(map(chr, range(0x20, 0x7F))), "".join(map(chr, range(0x100)))]
    texts = ["".join(rng.choices(rng.choice(pools), k=rng.randrange(1, 60))) for _ in range(count)]
    wide = [chr(rng.choice((rng.randrange(0x20, 0x3000), rng.randrange(0x10000, 0x1FFFF)))) for _ in range(50 * count)]
    return texts + ["".join(rng.choices(wide, k=20)) for _ in range(count)]


SAMPLES: Final = [
    *_WHITESPACE,
    *_WORDS,
    *_SCRIPTS,
    *_MARKS_AND_SYMBOLS,
    *_random_texts(60),
    " ".join(_WORDS + _SCRIPTS + _MARKS_AND_SYMBOLS),
    "a" * 700,
    " " * 700,
    "\n" * 700 + "x",
    "漢" * 700,
    "=" * 700,
    "12" * 350,
    "\u0301" * 50,
]


@lru_cache(maxsize=1)
def class_samples() -> list[str]:
    """Every character at which Unicode's category changes, and its neighbour, between letters, digits and blanks."""
    return list(_class_samples())


def _class_samples() -> Iterator[str]:
    edges: list[str] = []
    before = ""
    for code in (
        *range(0xD800),
        *range(0xE000, 0x20000),
        *range(0x2A6D0, 0x2A710),
        0xE0001,
        0xE0100,
        0xF0000,
        0x10FFFF,
    ):
        category = unicodedata.category(chr(code))
        if category != before:
            edges += [chr(code)] if not code or code == 0xE000 else [chr(code - 1), chr(code)]
        before = category
    for start in range(0, len(edges), 100):
        yield "".join(f"a{char}b 1{char}2 {char}. '{char}\n" for char in edges[start : start + 100])


def conversations() -> list[list[dict[str, Any]]]:
    """Messages to render a chat template with. A template may refuse some of them."""
    found: list[list[dict[str, Any]]] = []
    for start in range(0, len(SAMPLES) - 3, 4):
        first, second, third, system = SAMPLES[start : start + 4]
        turns = [_message("user", first), _message("assistant", second), _message("user", third)]
        found += [turns, [_message("system", system), *turns]]
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"x": " é\n"}}}
    asked: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    answered = {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": '{"x": 1}'}
    return [*found, [_message("user", "What is x?"), asked, answered]]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
