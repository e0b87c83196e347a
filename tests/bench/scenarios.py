"""Replays the three scenarios that Anthropic published for its prompt caching, on our engine through a real gateway.

    python -m tests.bench.scenarios [--data DIR] [--rounds 5] [--prices claude-5m]
    python -m tests.bench.scenarios --base-url http://host:8080/v1 --model NAME --context 100000

Theirs are in "Prompt caching with Claude" (anthropic.com/news/prompt-caching, August 2024): chat with a book (a cached
prompt of 100,000 tokens), many-shot prompting (10,000 tokens), a ten-turn conversation with a long system prompt. Ours
are the same three, the book cut to what the context holds: 16,384 tokens with the demo model. Without --base-url
`kvasir serve` is started for the run, with one engine and one thread.

    cold   the prompt begins with a line of its own, so that not one block of it is known
    warm   the same prefix with another question, after one request brought the prefix
    turns  times to the first token, summed over a conversation. Cold: every turn begins with a line of its own. Warm,
           two ways: the system prompt comes with this conversation (its first turn is cold), or was in an earlier one

Times are measured by the client, in streams, up to the first chunk that belongs to a token; medians of all rounds. A
conversation under a new system prompt computes one of its ten turns as if there were no cache, whatever the cache: it
cannot save much more than nine tenths. Costs are what the usage of the warm requests comes to in the price table,
against the same tokens at the input price: for book and shots of a request that finds its prefix, as published, for
the turns of everything from the first write on. Answers are short here, so that their price, which no cache lowers,
hardly counts.

DIR holds book_*.txt.gz, and doc_qa_xquad_en.jsonl.gz with "paragraphs" of "qas" of "q" and "a" (both public: Project
Gutenberg, XQuAD); without it the text is generated, with a fixed seed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import secrets
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from tests.bench.asking import Asked, Prices, ask
from tests.fakes.server import Server

Message = dict[str, str]

SPARE_TOKENS = 256
"""Of the context, for the line at the start, the question, the template and the answer."""
SHOTS_TOKENS, TURNS = 10_000, 10
SYSTEM_SHARE = 0.5  # of the context, for the long system prompt of the ten turns
QUESTIONS = (
    "Who speaks first?",
    "Where does it begin?",
    "What is said of the weather?",
    "Which names occur?",
    "How does it end?",
    "What is the longest journey in it?",
    "Who is not believed?",
)


# Dollars per million tokens of Claude Sonnet, as published: a write costs 1.25 times the input for five minutes and
# twice for an hour, a read a tenth. --prices also takes a JSON file with these four names.
PRICES = {
    "claude-5m": Prices(input=3.0, cached_read=0.3, cache_write=3.75, output=15.0),
    "claude-1h": Prices(input=3.0, cached_read=0.3, cache_write=6.0, output=15.0),
}


@dataclass
class Row:
    """One line of the table. The percentages are (time to the first token, cost) as published, and ours to reach."""

    name: str
    theirs: tuple[int, int]
    wanted: int
    cold_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    warm: list[Asked] = field(default_factory=list)

    def difference(self) -> float:
        """Percent; negative is faster."""
        return 100 * (statistics.median(self.warm_ms) / statistics.median(self.cold_ms) - 1)

    def cost_difference(self, prices: Prices) -> float:
        """Percent; negative is cheaper."""
        uncached = sum(asked.cost_uncached(prices) for asked in self.warm)
        return 100 * (sum(asked.cost(prices) for asked in self.warm) / uncached - 1)


class Chat:
    """Asks one model, one request at a time."""

    def __init__(self, client: openai.OpenAI, model: str, max_tokens: int) -> None:
        self._client, self._model, self._max_tokens = client, model, max_tokens

    def ask(self, messages: Sequence[Message], max_tokens: int | None = None) -> Asked:
        return ask(self._client, self._model, messages, max_tokens or self._max_tokens)

    def ask_cold(self, messages: Sequence[Message]) -> Asked:
        asked = self.ask(messages)
        assert not asked.cached, f"{asked.cached} tokens were known to a request that should find none"
        return asked

    def fit(self, text: str, tokens: int) -> str:
        """The longest beginning of `text` that makes a prompt of at most `tokens`, give or take a hundredth."""
        ratio = 2.5  # characters per token
        for _ in range(12):
            part = text[: int(tokens * ratio)]
            try:
                counted = self.ask([system(part), user(QUESTIONS[0])], 1).prompt
            except openai.BadRequestError as error:
                if error.code != "context_length_exceeded":
                    raise
                ratio *= 0.7
                continue
            if 0.99 * tokens <= counted <= tokens or (part == text and counted <= tokens):
                return part
            ratio = len(part) / counted * 0.995
        raise RuntimeError(f"no beginning of the text has about {tokens} tokens")


def system(text: str) -> Message:
    """A line that no other message has, and the text."""
    return {"role": "system", "content": f"Copy {secrets.token_hex(8)}.\n{text}"}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


# -- the scenarios ----------------------------------------------------------------------------------------------------


def ask_about(chat: Chat, row: Row, text: str, rounds: int) -> None:
    """One long prefix, several questions."""
    for _ in range(rounds):
        prefix = system(text)
        row.cold_ms.append(chat.ask_cold([prefix, user(QUESTIONS[0])]).first_ms)
        for question in QUESTIONS[1:]:
            asked = chat.ask([prefix, user(question)])
            row.warm.append(asked)
            row.warm_ms.append(asked.first_ms)


def converse(chat: Chat, fresh: Row, known: Row, text: str, turns: Sequence[tuple[str, str]], rounds: int) -> None:
    """Conversations of the same turns: nothing reused, under a new system prompt, and under one that was used."""
    for number in range(rounds):
        cold = [chat.ask_cold([system(text), *history]) for history in histories(turns, number)]
        prefix = system(text)
        for row, other in ((fresh, 2 * number), (known, 2 * number + 1)):
            warm = [chat.ask([prefix, *history]) for history in histories(turns, other)]
            row.cold_ms.append(sum(asked.first_ms for asked in cold))
            row.warm_ms.append(sum(asked.first_ms for asked in warm))
            row.warm += warm


def histories(turns: Sequence[tuple[str, str]], conversation: int) -> Iterator[list[Message]]:
    """What stands below the system prompt at each turn. The number makes the first question one of its own."""
    messages = [user(f"This is conversation {conversation}.")]
    for question, answer in turns:
        messages[-1] = user(f"{messages[-1]['content']} {question}" if len(messages) == 1 else question)
        yield list(messages)
        messages += [{"role": "assistant", "content": answer}, user("")]


# -- texts ------------------------------------------------------------------------------------------------------------


def read_texts(folder: Path) -> tuple[str, str]:
    """A book, and shots of questions and answers."""
    book = "\n".join(gzip.decompress(file.read_bytes()).decode() for file in sorted(folder.glob("book_*.txt.gz")))
    with gzip.open(folder / "doc_qa_xquad_en.jsonl.gz", "rt", encoding="utf-8") as lines:
        paragraphs = [paragraph for line in lines for paragraph in json.loads(line)["paragraphs"]]
    shots = [f"Question: {qa['q']}\nAnswer: {qa['a']}\n" for paragraph in paragraphs for qa in paragraph["qas"]]
    return book, "\n".join(shots * 10)


def make_texts(words: int) -> tuple[str, str]:
    """The same of generated words; half of them are common ones, as in a text."""
    dice = random.Random(0)
    common = ["the", "of", "and", "a", "to", "was", "in", "he", "that", "it", "had", "with", "for", "her", "not"]
    rare = ["".join(dice.choices("etaoinshrdlucm", k=dice.randrange(3, 10))) for _ in range(4000)]

    def sentence() -> str:
        return " ".join(dice.choice(common if dice.random() < 0.5 else rare) for _ in range(12)).capitalize() + "."

    book = " ".join(sentence() for _ in range(words // 12))
    shots = [f"Question: {sentence()[:-1]}?\nAnswer: {dice.choice(rare)}\n" for _ in range(words // 12)]
    return book, "\n".join(shots)


# -- the run ----------------------------------------------------------------------------------------------------------


def run(chat: Chat, texts: tuple[str, str], context: int, rounds: int) -> list[Row]:
    book, shots = texts
    rows = [
        Row("chat with a book", (-79, -90), -97),
        Row("many-shot prompting", (-31, -86), -90),
        Row("ten turns, system prompt seen before", (-75, -53), -95),
        Row("ten turns, system prompt new", (-75, -53), -95),
    ]
    chat.ask([user("Hello.")])
    ask_about(chat, rows[0], chat.fit(book, context - SPARE_TOKENS), rounds)
    ask_about(chat, rows[1], chat.fit(shots, min(SHOTS_TOKENS, context - SPARE_TOKENS)), rounds)
    answers = [book[-400 * (turn + 1) :][:300] for turn in range(TURNS)]
    turns = [(QUESTIONS[turn % len(QUESTIONS)], answer) for turn, answer in enumerate(answers)]
    converse(chat, rows[3], rows[2], chat.fit(book, int(context * SYSTEM_SHARE)), turns, rounds)
    return rows


def print_table(rows: Sequence[Row], prices: Prices) -> None:
    columns = ["scenario", "prompt tokens", "reused", "TTFT cold ms", "TTFT warm ms", "TTFT", "wanted", "Anthropic's"]
    columns += ["cost", "Anthropic's"]
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for row in rows:
        prompt = statistics.mean(asked.prompt for asked in row.warm)
        reused = sum(asked.cached for asked in row.warm) / sum(asked.prompt for asked in row.warm)
        cells = [row.name, f"{prompt:,.0f}", f"{reused:.1%}"]
        cells += [f"{statistics.median(row.cold_ms):,.1f}", f"{statistics.median(row.warm_ms):,.1f}"]
        cells += [f"{row.difference():.1f}%", f"{row.wanted}%", f"{row.theirs[0]}%"]
        cells += [f"{row.cost_difference(prices):.1f}%", f"{row.theirs[1]}%"]
        print("| " + " | ".join(cells) + " |")


@contextmanager
def served(arguments: argparse.Namespace) -> Iterator[openai.OpenAI]:
    """A client of the server that was named, or of one that runs for as long as this."""
    if arguments.base_url:
        with openai.OpenAI(base_url=arguments.base_url, api_key=arguments.api_key, max_retries=0) as client:
            yield client
        return
    flags = ["--model", arguments.model] if arguments.model else []
    flags += ["--threads", str(arguments.threads), "--kv-cache-bytes", str(arguments.kv_cache_bytes)]
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder), *flags) as server:
        yield server.client()


def read_prices(given: str) -> Prices:
    """A table by its name, or a JSON file with the four prices."""
    return PRICES[given] if given in PRICES else Prices(**json.loads(Path(given).read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None, help="folder with books and questions")
    parser.add_argument("--base-url", default=None, help="a server that runs; without it one is started")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default=None, help="model to start, or to ask for at --base-url")
    parser.add_argument("--context", type=int, default=16_384, help="tokens; what the model holds")
    parser.add_argument("--threads", type=int, default=1, help="of the engine that is started")
    parser.add_argument("--kv-cache-bytes", type=int, default=1 << 30, help="of the engine that is started")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=4, help="of each answer")
    parser.add_argument("--prices", default="claude-5m", help=f"{', '.join(PRICES)}, or a JSON file")
    arguments = parser.parse_args()

    prices = read_prices(arguments.prices)
    texts: Any = read_texts(arguments.data) if arguments.data else make_texts(arguments.context * 2)
    with served(arguments) as client:
        model = arguments.model if arguments.base_url and arguments.model else client.models.list().data[0].id
        rows = run(Chat(client, model, arguments.max_tokens), texts, arguments.context, arguments.rounds)
    print_table(rows, prices)


if __name__ == "__main__":
    main()
