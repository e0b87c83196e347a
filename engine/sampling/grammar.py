"""Grammars: what a sequence may say next. Compiles a JSON Schema, any JSON object, a regular expression or a Lark
grammar, in which schemas may be nested, for the model's tokeniser, and says after each token which ones may follow.

A mask depends on nothing but the tokens that were sampled already, so it can be computed while the model computes the
step, and the state of a matcher can be made again from the tokens. White space between JSON tokens is at most one blank
behind `,` and `:`, so that a weak model's output comes to an end.

llguidance writes text that has to come as the tokeniser would, and the tokeniser takes "<|im_end|>" in a constant for
the end of the answer. So added tokens that are not ordinary text get names that cannot be written; text is then spelled
with all other tokens. Grammars say such a token by its id, and those that say it by its name are rewritten.

Rules, terminals and nesting are counted before the compiler follows them; schemas have their limits in
engine/protocol/schema_limits.py. llguidance does the work, which is native code that a grammar may crash or keep busy.
So this runs in the processes of engine/sampling/grammar_server.py and nowhere else. No torch and no numpy, to keep them
small.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import llguidance

from engine.protocol import MAX_GRAMMAR_BYTES, Grammar, SchemaError, check_schema
from engine.sampling import schema as schemas

MAX_LOCATED: Final = 2_000
"""Schemas inside of one that is refused, which are looked through for the reason."""

_OUTPUT: Final[Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": '"\\bfnrt',  # no \\u and no \\/: a key that may not be there cannot be spelled otherwise
}
_LIMITS: Final = llguidance.LLParserLimits(
    max_lexer_states=50_000,
    max_items_in_row=24_000,  # four for each property that may be left out, of 5,000
    initial_lexer_fuel=20_000_000,  # 10,000 for each number with a name; time and memory are bounded elsewhere
    verbose_errors=False,
)
_MESSAGE_CHARS: Final = 300
_REF_ELSEWHERE: Final = re.compile(r'"\$ref": "#(?!/\$defs/|/definitions/)')


class GrammarError(SchemaError):
    """A grammar that cannot be carried out. `path` leads to the reason inside of a schema; empty otherwise."""


class GrammarState:
    """Where one sequence is in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> GrammarState:
        """Another one at the same place. Cheap: they share what is compiled."""
        return GrammarState(self._matcher.deep_copy())

    def consume(self, tokens: Iterable[int]) -> None:
        """Goes on by tokens that the mask allowed. Others leave a matcher that has failed."""
        for token in tokens:
            self._matcher.consume_token(token)

    def bits(self) -> bytes | None:
        """Which tokens may come next, one bit for each id, the lowest first. Tokens that end the text are among them
        only where the text is complete. None, and nothing is allowed, when the matcher has failed: the grammar was too
        complex, or a token came that it does not have."""
        bits: bytes = self._matcher.compute_bitmask()
        return None if _is_dead(self._matcher) else bits

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())


class Grammars:
    """Compiles grammars for one tokeniser."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """
        tokenizer_json  the file of the tokenizers library
        vocab_size      rows of the model's logits; not below the tokeniser's own
        Takes a second for a vocabulary of 128,000 tokens. Raises GrammarError for a tokeniser that cannot be used.
        """
        if not eos_ids:
            raise GrammarError("", "the model has no token that ends a text")
        try:
            renamed, self._special_ids = rename_specials(tokenizer_json)
            try:
                self._tokenizer = llguidance.LLTokenizer(renamed, n_vocab=vocab_size, eos_token=list(eos_ids))
            except (ValueError, RuntimeError):  # merges that speak of a special token by its name
                self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids))
                self._special_ids = {}
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise GrammarError("", f"this model's tokeniser cannot be constrained: {_short(str(error))}") from None

    def compile(self, grammar: Grammar) -> GrammarState:
        """A matcher at the beginning. Milliseconds, for the hardest schemas seconds. Raises GrammarError."""
        return GrammarState(self._compile(grammar))

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarError("", f"it may be {MAX_GRAMMAR_BYTES} bytes long")
        if grammar.kind == "json_schema":
            return self._compile_schema(grammar.text)
        if grammar.kind == "json_object":
            return self._compile_schema('{"type": "object"}')
        if grammar.kind == "regex":
            _refuse("", find_nested_too_deep(grammar.text))
            source = llguidance.LLMatcher.grammar_from_regex(grammar.text)
        elif grammar.kind == "lark":
            _check_lark(grammar.text, "")
            source = llguidance.LLMatcher.grammar_from_lark(by_id(grammar.text, self._special_ids))
        elif grammar.kind == "lark_schemas":
            return self._compile_nested(grammar.text)
        else:
            raise GrammarError("", f"there is no grammar of kind {grammar.kind!r}")
        compiled, error = self._try(source)
        if compiled is None:
            raise GrammarError("", error)
        return compiled

    def _compile_schema(self, text: str) -> llguidance.LLMatcher:
        try:
            original = schemas.parse(text)
            check_schema(original)
            schema = schemas.prepare(original)
        except SchemaError as mistake:
            raise GrammarError(mistake.path, mistake.reason) from None
        return self._compile_prepared(schema)[0]

    def _compile_prepared(self, schema: Any) -> tuple[llguidance.LLMatcher, str]:
        """The matcher and its source."""
        source = _grammar_of(schema)
        compiled, error = self._try(source)
        if compiled is None:
            raise GrammarError(*self._locate(schema, error))
        return compiled, source

    def _compile_nested(self, text: str) -> llguidance.LLMatcher:
        """Each schema is compiled by itself first. In the larger grammar it would be one of several ways to go on, and
        nobody would be told that nothing can satisfy it."""
        nested = _parse_nested(text)
        _check_lark(nested["lark"], "lark")
        inner: list[dict[str, Any]] = [{"name": "", "lark_grammar": by_id(nested["lark"], self._special_ids)}]
        for name, original in nested["schemas"].items():
            try:
                check_schema(original)
                _, source = self._compile_prepared(schemas.prepare(original))
            except SchemaError as mistake:
                path = schemas.join(f"schemas.{name}", mistake.path) if mistake.path else f"schemas.{name}"
                raise GrammarError(path, mistake.reason) from None
            inner.append({**json.loads(source)["grammars"][0], "name": name})
        compiled, error = self._try(json.dumps({"grammars": inner}))
        if compiled is None:
            raise GrammarError("lark", error)
        return compiled

    def _try(self, source: str) -> tuple[llguidance.LLMatcher | None, str]:
        """The matcher at its start, or why there is none."""
        compiled = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        if compiled.is_error():
            return None, _short(compiled.get_error())
        probe = compiled.deep_copy()
        probe.compute_bitmask()
        if _is_dead(probe):
            return None, _short(probe.get_error()) or "nothing can satisfy it"
        return compiled, ""

    def _locate(self, schema: Any, error: str) -> tuple[str, str]:
        """Path and message of the innermost schema that cannot be compiled by itself, given the root's definitions."""
        root = schema if isinstance(schema, dict) else {}
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        for count, (path, inner) in enumerate(schemas.subschemas(schema)):
            if count >= MAX_LOCATED:
                break
            if inner is False or _REF_ELSEWHERE.search(json.dumps(inner)):
                continue  # forbidding something is no mistake; the others mean nothing outside of their root
            alone = {**definitions, **inner} if isinstance(inner, dict) else inner
            compiled, inner_error = self._try(_grammar_of(alone))
            if compiled is None:
                return path, inner_error
        return "", error


def _is_dead(matcher: llguidance.LLMatcher) -> bool:
    """Whether no text can come of it any more. It stops where the text is complete, too."""
    return bool(matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()))


def _grammar_of(schema: Any) -> str:
    if isinstance(schema, bool):
        schema = {"anyOf": [schema]}
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OUTPUT)


def _parse_nested(text: str) -> Any:
    try:
        nested = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError("", f"it cannot be read: {error}") from None
    if not (isinstance(nested, dict) and set(nested) == {"lark", "schemas"} and isinstance(nested["schemas"], dict)):
        raise GrammarError("", "an object of 'lark' and 'schemas' is expected")
    return nested


def _check_lark(lark: Any, path: str) -> None:
    if not isinstance(lark, str):
        raise GrammarError(path, "a Lark grammar is a string")
    try:
        excess = find_excess(lark)
    except SchemaError as error:
        raise GrammarError(path, f"a schema in it is beyond a limit: {error}") from None
    _refuse(path, excess)


def _refuse(path: str, excess: str | None) -> None:
    if excess is not None:
        raise GrammarError(path, excess)


def _short(message: str) -> str:
    """The first lines of a compiler's message."""
    flat = " ".join(message.split())
    return flat if len(flat) <= _MESSAGE_CHARS else flat[:_MESSAGE_CHARS] + "..."


MAX_RULES: Final = 1_000
"""A chain of 3,500 rules is too deep for the compiler's stack."""
MAX_TERMINALS: Final = 1_000
MAX_NESTING: Final = 200
"""Brackets inside of each other."""

_SAID: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*')
"""Strings, regular expressions and comments."""
_DEFINITION: Final = re.compile(r"^[ \t]*[?!]{0,2}_?([A-Za-z])\w*[^:\n]*:", re.MULTILINE)
_BRACKET: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[(){}]", re.DOTALL)
_JSON: Final = re.compile(r"%(?:json|llguidance)[ \t\r\n]*")


def find_excess(lark: str) -> str | None:
    """What of a Lark grammar is beyond the limits. Raises SchemaError for a schema in it that is."""
    for found in _JSON.finditer(lark):
        check_schema(_decode_inline(lark, found.end()))
    bare = _SAID.sub("", lark)
    if _nesting(bare) > MAX_NESTING:
        return f"brackets may be nested {MAX_NESTING} levels deep"
    defined = [name.group(1).isupper() for name in _DEFINITION.finditer(bare)]
    terminals = sum(defined)
    if terminals > MAX_TERMINALS:
        return f"it has {terminals} terminals, and may have {MAX_TERMINALS}"
    if len(defined) - terminals > MAX_RULES:
        return f"it has {len(defined) - terminals} rules, and may have {MAX_RULES}"
    return None


def find_nested_too_deep(expression: str) -> str | None:
    """What of a regular expression is beyond the limits."""
    return f"groups may be nested {MAX_NESTING} levels deep" if _nesting(expression) > MAX_NESTING else None


def _nesting(text: str) -> int:
    depth = deepest = 0
    for found in _BRACKET.finditer(text):
        if found[0] in "({":
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in ")}":
            depth -= 1
    return deepest


def _decode_inline(lark: str, start: int) -> Any:
    """A schema that stands in a Lark grammar; None for what is none, of which the compiler says what it thinks."""
    try:
        return json.JSONDecoder().raw_decode(lark, start)[0]
    except (ValueError, RecursionError):
        return None


_BYTE: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LARK_PARTS: Final = r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*'
"""Strings, regular expressions and comments of a Lark grammar."""


def rename_specials(tokenizer_json: str) -> tuple[str, dict[str, int]]:
    """The tokeniser with its special tokens renamed, and their ids by the names that they had."""
    spec: dict[str, Any] = json.loads(tokenizer_json)
    added = spec.get("added_tokens") or []
    ids = {token["content"]: token["id"] for token in added if _is_special(token)}
    nonce = secrets.token_hex(8)
    names = {content: f"<\ue0f0{nonce}x{index}\ue0f1>" for content, index in ids.items()}
    for token in added:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "special": True, "normalized": False}
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    spec["post_processor"] = None  # speaks of them by name, and is for whole prompts
    return json.dumps(spec, ensure_ascii=False), ids


def by_id(lark: str, ids: Mapping[str, int]) -> str:
    """A Lark grammar with the special tokens in it named by their ids."""
    if not ids:
        return lark
    names = "|".join(re.escape(name) for name in sorted(ids, key=len, reverse=True))
    return re.sub(f"{_LARK_PARTS}|({names})", lambda found: f"<[{ids[found[1]]}]>" if found[1] else found[0], lark)


def _is_special(token: Mapping[str, Any]) -> bool:
    """As llguidance sees it, for which what looks like a tag is special, too."""
    content = token["content"]
    tag = content.startswith("<") and content.endswith(">") and not _BYTE.fullmatch(content)
    return bool(token["special"] or tag)
