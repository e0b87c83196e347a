"""What the engine answers over plain HTTP."""

from __future__ import annotations

from dataclasses import replace

from engine.protocol import TokenizerFiles


def test_the_fingerprint_of_a_tokeniser_covers_all_of_it() -> None:
    files = TokenizerFiles("{}", "template", {"bos_token": "<s>"}, add_bos=False)
    others = [
        replace(files, tokenizer_json="{ }"),
        replace(files, chat_template=None),
        replace(files, special_tokens={}),
        replace(files, add_bos=True),
    ]
    assert len({files.fingerprint(), *(other.fingerprint() for other in others)}) == 5
    assert TokenizerFiles.from_json(files.to_json()).fingerprint() == files.fingerprint()
