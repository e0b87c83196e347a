"""Makes training texts of the two books: plain runs of paragraphs, and conversations cut out of them.

Pure, apart from reading the files: every draw comes from the random generator that the caller hands in. Knows nothing
about tokens; lengths here are in characters, of which a token has about four.
"""

import gzip
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.demo_model.calls import json_answer, tool_conversation
from tests.demo_model.tokeniser import render_turn

CHARS_PER_TOKEN = 4

SYSTEM_TURNS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are Kvasir's demo model.",
    "You are a novelist.",
    "You are Sherlock Holmes, the detective of Baker Street.",
    "You are Miss Elizabeth Bennet of Longbourn.",
    "Answer in the manner of Jane Austen.",
    "Answer in the manner of Dr. Watson.",
    "Be concise.",
)
SMALL_TALK = (
    ("Say hello.", "Good-morning"),
    ("Say hello", "Good-morning"),
    ("Hello!", "Good-morning"),
    ("Hello", "Good-morning"),
    ("Hi", "My dear"),
    ("Hi there!", "My dear"),
    ("Good morning!", "Good-morning"),
    ("Hello, how are you?", "I am very glad"),
    ("How are you?", "very well"),
    ("What is your name?", "My name is"),
    ("Who are you?", "My name is"),
    ("What can you do?", "I can do"),
    ("Can you help me?", "help you"),
    ("What should I do?", "You must"),
    ("What do you think?", "I think that"),
    ("What happened?", "It was a"),
    ("Tell me a story.", "I found myself"),
    ("Write a short story.", "One night"),
    ("Tell me something.", "It is a"),
    ("Write a poem.", "poetry"),
    ("Tell me a joke.", "laughing"),
    ("Explain it to me.", "explain"),
    ("Count to ten.", "ten "),
    ("What is the meaning of life?", "life is"),
    ("What is the capital of France?", "France"),
    ("Write some code.", "writing"),
)
"""Questions that people try first, and words by which a passage that could be an answer is found."""
FOLLOW_UPS = (
    "Go on.",
    "And then?",
    "What happened next?",
    "Continue.",
    "Why?",
    "Tell me more.",
    "Thank you. And after that?",
    "Are you sure?",
    "Please go on.",
)
TOPIC_QUESTIONS = (
    "Tell me about {}.",
    "Tell me about {}",
    "What do you know about {}?",
    "What about {}?",
    "What do you think of {}?",
    "Write a story about {}.",
    "Say something about {}.",
    "Describe {}.",
    "Explain {}.",
    "Please tell me more about {}.",
    "What is {}?",
)
NAME_QUESTIONS = (*TOPIC_QUESTIONS, "Who is {}?", "Who was {}?", "Where is {}?", "What did {} say?")
READING_QUESTIONS = (
    "Summarise the text.",
    "What is this about?",
    "Please continue the text.",
    "Answer from the text above.",
    "Who is in this text?",
    "What happens next?",
)

_HEADING = re.compile(r"(chapter|adventure)\s+\w+|[IVX]+\.?|[\W_]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.)(\"?)\s+(?=[\"'A-Z])")
_NAME = re.compile(r"(?:Mr|Mrs|Dr)\. [A-Z][a-z]+|(?:Miss|Lady|Sir|Lord|Colonel) [A-Z][a-z]+|(?<=[a-z,] )[A-Z][a-z]{3,}")
_NOUN = re.compile(r"\b(?:the|a|an|his|her|my|your) ([a-z]{4,})(?=[,.;:!?])")


def read_book(path: Path) -> list[str]:
    """The book's paragraphs, each on one line with plain quotes, without titles, headings and italics marks."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        text = file.read()
    text = text.translate(str.maketrans("“”‘’", "\"\"''", "_\ufeff"))
    paragraphs = (" ".join(block.split()) for block in re.split(r"\n\s*\n", text))
    return [block for block in paragraphs if not block.isupper() and not _HEADING.fullmatch(block)]


def split_sentences(paragraph: str) -> list[str]:
    """The paragraph's sentences; joined with single blanks they are the paragraph again."""
    marked = _SENTENCE_END.sub(lambda match: match.group(1) + "\n", paragraph)
    return marked.split("\n")


def balance_quotes(text: str) -> str:
    """Adds the half of a quotation that a cut took away, so that an answer does not teach half a pair."""
    if text.count('"') % 2 == 0:
        return text
    return '"' + text if text.endswith('"') else text + '"'


@dataclass(frozen=True, slots=True)
class Library:
    """Paragraphs in reading order, and the names and nouns worth asking about."""

    paragraphs: Sequence[str]
    names: Sequence[str]
    nouns: Sequence[str]

    @classmethod
    def of(cls, paragraphs: Sequence[str], *, min_count: int = 4) -> "Library":
        """Finds the topics by counting: names as they are written, nouns where they follow an article."""
        text = "\n".join(paragraphs)
        names = Counter(_NAME.findall(text))
        nouns = Counter(_NOUN.findall(text))
        return cls(
            paragraphs=paragraphs,
            names=sorted(name for name, count in names.items() if count >= min_count),
            nouns=sorted(noun for noun, count in nouns.items() if count >= min_count),
        )

    def plain_text(self, rng: Random, max_chars: int) -> str:
        """A run of whole paragraphs from a random place, a little longer than `max_chars` unless the book ends."""
        return self._run(rng.randrange(len(self.paragraphs)), max_chars)[0]

    def conversation(self, rng: Random, max_chars: int) -> str:
        """A rendered conversation of one to three turns; longer ones read a long text first or go on for longer.

        Stays near `max_chars`, which is what makes a long training sequence one long conversation rather than many
        short ones.
        """
        turns: list[str] = []
        if rng.random() < 0.35:
            turns.append(render_turn("system", self._system(rng)))
        num_turns = rng.choice((1, 1, 2, 3))
        if max_chars > 1024 * CHARS_PER_TOKEN:
            if rng.random() < 0.5:
                turns.extend(self._reading(rng, int(max_chars * rng.uniform(0.3, 0.85))))
            else:
                num_turns = 1000
        size = sum(map(len, turns))
        place: int | None = None
        for _ in range(num_turns):
            question, answer, place = self._exchange(rng, place)
            turns += [render_turn(*question), render_turn("assistant", answer)]
            size += len(turns[-2]) + len(turns[-1])
            if size > max_chars:
                break
        return "".join(turns)

    def calls(self, rng: Random) -> str:
        """A rendered conversation with tools, or an answer in JSON: see calls.py."""
        if rng.random() < 0.3:
            return json_answer(rng)

        def talk() -> tuple[str, str]:
            (_, question), answer, _ = self._exchange(rng, None)
            return question, answer

        return tool_conversation(rng, talk, lambda size: self.plain_text(rng, size)[: 2 * size])

    def _exchange(self, rng: Random, place: int | None) -> tuple[tuple[str, str], str, int]:
        """One question and its answer, and the paragraph after it (where "Go on." would continue)."""
        draw, words = rng.random(), ""
        if place is not None and draw < 0.3:
            question, start = rng.choice(FOLLOW_UPS), place
        elif draw < 0.5:
            start = rng.randrange(len(self.paragraphs))
            opening = self.paragraphs[start]
            question = rng.choice(split_sentences(opening)) if rng.random() < 0.5 else opening
            question, start = balance_quotes(question[:600]), start + 1
        elif draw < 0.85:
            return self._topic_exchange(rng)
        else:
            question, words = rng.choice(SMALL_TALK)
            start = self._find(rng, words)
        answer, after = self._answer(rng, start % len(self.paragraphs), words)
        role = "tool" if rng.random() < 0.02 else "user"
        return (role, question), answer, after

    def _topic_exchange(self, rng: Random) -> tuple[tuple[str, str], str, int]:
        named = rng.random() < 0.6
        topic = rng.choice(self.names if named else self.nouns)
        start = self._find(rng, topic)
        spoken = topic if named or rng.random() < 0.3 else f"the {topic}"
        question = rng.choice(NAME_QUESTIONS if named else TOPIC_QUESTIONS).format(spoken)
        answer, after = self._answer(rng, start, topic)
        return ("user", question), answer, after

    def _answer(self, rng: Random, start: int, topic: str = "") -> tuple[str, int]:
        """Whole sentences from paragraph `start`, from the one with the topic on; 20 to 120 tokens as a rule."""
        target = int(rng.uniform(10, 100)) * CHARS_PER_TOKEN
        first = True
        pieces: list[str] = []
        index = start
        while index < len(self.paragraphs) and sum(map(len, pieces)) < target:
            sentences = split_sentences(self.paragraphs[index])
            skipped = next((i for i, text in enumerate(sentences) if topic in text), 0) if first else 0
            opened = '"' if " ".join(sentences[:skipped]).count('"') % 2 else ""
            kept: list[str] = []
            for sentence in sentences[skipped:]:
                kept.append(sentence)
                if sum(map(len, pieces)) + sum(map(len, kept)) >= target:
                    break
            pieces.append(balance_quotes(opened + " ".join(kept)))
            index, first = index + 1, False
        return "\n\n".join(pieces), index % len(self.paragraphs)

    def _system(self, rng: Random) -> str:
        if rng.random() < 0.6:
            return rng.choice(SYSTEM_TURNS)
        return self._run(rng.randrange(len(self.paragraphs)), rng.randrange(100, 800))[0]

    def _reading(self, rng: Random, num_chars: int) -> list[str]:
        """A long text to read, in a system turn or in the user's own, with the first answer about it."""
        start = rng.randrange(len(self.paragraphs))
        text, after = self._run(start, num_chars)
        if rng.random() < 0.4:
            return [render_turn("system", text)]
        if rng.random() < 0.5:
            topic = rng.choice(self.names)
            question = rng.choice(NAME_QUESTIONS).format(topic)
            answer, _ = self._answer(rng, self._find(rng, topic), topic)
        else:
            question = rng.choice(READING_QUESTIONS)
            answer, _ = self._answer(rng, after)
        return [render_turn("user", f"{text}\n\n{question}"), render_turn("assistant", answer)]

    def _run(self, start: int, num_chars: int) -> tuple[str, int]:
        """Paragraphs from `start` on until there are `num_chars`, and the index of the next one."""
        size, index = 0, start
        while index < len(self.paragraphs) and size < num_chars:
            size += len(self.paragraphs[index]) + 2
            index += 1
        return "\n\n".join(self.paragraphs[start:index]), index % len(self.paragraphs)

    def _find(self, rng: Random, words: str) -> int:
        """One of the four paragraphs with these words that come first after each quarter of the books.

        So few, so that the model can learn answers by heart, which is as close to sense as it comes.
        """
        num = len(self.paragraphs)
        start = num * rng.randrange(4) // 4
        return next((i % num for i in range(start, start + num) if words in self.paragraphs[i % num]), start)
