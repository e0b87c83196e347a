"""Makes training texts with tools: conversations in which a function is called, and answers that are JSON.

Pure, as books.py is: every draw comes from the random generator that the caller hands in. What is learned from these
texts is a form, not sense: which tool fits a question that has its words in it, arguments that are short, strings,
lists and objects that end, one call for one question, and text again behind a tool's result.
"""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tests.demo_model.tokeniser import render_turn

PLACES = ("London", "Paris", "Berlin", "Bath", "Brighton", "Rome", "New York", "Tokyo", "Madrid", "Oslo", "Vienna")
PEOPLE = ("Mr. Darcy", "Mr. Holmes", "Dr. Watson", "Miss Bennet", "Mr. Bingley", "Lady Catherine", "Irene Adler")
THINGS = ("a tree", "the letter", "the carriage", "a hat", "the report", "the weather", "the news", "a key", "tea")
PATHS = ("README.md", "main.py", "notes.txt", "src/app.py", "letters/one.txt", "index.html", "data.csv")
COMMANDS = ("ls", "ls -la", "pwd", "date", "echo hello", "cat README.md", "git status")
WORDS = (*PLACES, *PEOPLE, *THINGS)
UNITS = ("celsius", "fahrenheit")

KINDS = ("string", "string", "string", "integer", "number", "boolean", "enum", "array", "object")
FIELDS = ("name", "title", "city", "kind", "number", "count", "tags", "text", "value", "id", "color", "size", "answer")
CHOICES = ("red", "green", "blue", "small", "large", "root", "leaf", "yes", "no", "online", "batch")

# name, description, question, parameters, the values that the question and the arguments share
KNOWN_TOOLS: tuple[tuple[str, str, str, str, Sequence[str]], ...] = (
    ("get_weather", "Get the weather of a city.", "What is the weather in {}?", "location", PLACES),
    ("get_weather", "Current weather.", "What's the weather like in {}?", "city", PLACES),
    ("get_current_weather", "The weather in a place.", "How is the weather in {} today?", "location", PLACES),
    ("get_time", "The time in a city.", "What time is it in {}?", "city", PLACES),
    ("get_capital", "The capital of a country.", "What is the capital of {}?", "country", ("France", "Italy", "Spain")),
    ("search", "Searches.", "Search for {}.", "query", WORDS),
    ("search_web", "Searches the web.", "Search the web for {}.", "query", WORDS),
    ("find_person", "Finds a person.", "Find {}.", "name", PEOPLE),
    ("send_letter", "Sends a letter.", "Send a letter to {}.", "to", PEOPLE),
    ("read_file", "Reads a file.", "Read the file {}.", "path", PATHS),
    ("write_file", "Writes a file.", "Write the file {}.", "path", PATHS),
    ("run_command", "Runs a command in a shell.", "Run {}.", "command", COMMANDS),
    ("calculate", "Calculates.", "Calculate {}.", "expression", ("1 + 1", "2 + 2", "12 * 3", "7 - 4", "100 / 5")),
    ("plant", "Plants something.", "Plant {}.", "what", THINGS),
    ("translate", "Translates a text.", "Translate {}.", "text", WORDS),
)
NO_ARGUMENTS = ("now", "ping", "list_files", "get_status", "stop")
NO_CALL_SHARE = 0.5
"""Of the conversations with tools: a question that fits none of them, answered with text."""


def called(name: str, arguments: dict[str, Any]) -> str:
    """A call as the chat template writes it."""
    return f'{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}'


def tool(name: str, description: str, parameters: dict[str, Any] | None) -> str:
    """A tool as the chat template writes it."""
    function: dict[str, Any] = {"name": name, "description": description}
    if parameters is not None:
        function["parameters"] = parameters
    return json.dumps({"type": "function", "function": function})


def json_answer(rng: Random) -> str:
    """A rendered question for JSON, and an answer of one short object."""
    schema = _object_schema(rng, depth=2)
    question = rng.choice(WORDS)
    wanted = rng.choice(("Answer in JSON.", "Reply with a JSON object.", "Give me {} as JSON.", "Describe {} in JSON."))
    told = f"\n{json.dumps(schema)}" if rng.random() < 0.3 else ""
    answer = json.dumps(_value(rng, schema, question))
    return render_turn("user", wanted.format(question) + told) + render_turn("assistant", answer)


def tool_conversation(rng: Random, talk: Callable[[], tuple[str, str]], describe: Callable[[int], str]) -> str:
    """A rendered conversation with tools in front: a call or two and their results, or text.

    talk      a question that has nothing to do with tools, and its answer
    describe  prose of about that many characters, for long descriptions
    """
    tools = [_tool(rng, describe) for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 8)))]
    question, answer, own = _exchange(rng)
    for text in own:
        tools.insert(rng.randrange(len(tools) + 1), text)
    turns = [render_turn("system", "\n".join(tools))]
    if rng.random() < 0.4:
        turns.append(render_turn("system", "You are a helpful assistant."))
    if rng.random() < NO_CALL_SHARE:
        asked, told = talk()
        return "".join([*turns, render_turn("user", asked), render_turn("assistant", told)])
    turns += [render_turn("user", question), render_turn("assistant", "\n".join(answer))]
    if rng.random() < 0.5:
        results = [rng.choice((rng.choice(WORDS), json.dumps({"result": rng.choice(WORDS)}), "Done.")) for _ in answer]
        turns += [render_turn("tool", result) for result in results]
        turns.append(render_turn("assistant", talk()[1]))
    return "".join(turns)


def _exchange(rng: Random) -> tuple[str, list[str], list[str]]:
    """A question, the calls that answer it, and the tools for that."""
    draw = rng.random()
    if draw < 0.12:
        name = rng.choice(NO_ARGUMENTS)
        question = f"{rng.choice(('Call', 'Use', 'Please call'))} {name}."
        return question, [called(name, {})], [tool(name, f"{name}.", rng.choice((None, _no_parameters())))]
    if draw < 0.45:
        schema = _object_schema(rng, depth=2)
        name, value = f"{rng.choice(('make', 'set', 'add', 'save', 'get'))}_{rng.choice(FIELDS)}", rng.choice(WORDS)
        question = rng.choice(
            (f"Use {name} with {value}.", f"Call {name} for {value}.", f"Please call {name}: {value}")
        )
        return question, [called(name, _value(rng, schema, value))], [tool(name, "", schema)]
    name, description, asked, field, values = rng.choice(KNOWN_TOOLS)
    schema = {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}
    chosen = [rng.choice(values)]
    if rng.random() < 0.2:
        chosen.append(rng.choice(values))
    calls = []
    with_unit = "weather" in name and rng.random() < 0.5
    if with_unit:
        schema["properties"]["unit"] = {"type": "string", "enum": list(UNITS)}
    for value in chosen:
        unit = {"unit": rng.choice(UNITS)} if with_unit else {}
        calls.append(called(name, {field: value, **unit}))
    question = asked.format(" and ".join(chosen))
    return question, calls, [tool(name, description, schema)]


def _tool(rng: Random, describe: Callable[[int], str]) -> str:
    """A tool that is there and not asked for, now and then with a description as long as those that agents send."""
    name, description, _, field, _ = rng.choice(KNOWN_TOOLS)
    if rng.random() < 0.2:
        description = describe(rng.choice((200, 800, 3000)))
    schema = {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}
    return tool(rng.choice((name, f"{name}_2", f"old_{name}")), description, schema)


def _no_parameters() -> dict[str, Any]:
    return {"type": "object", "properties": {}}


def _object_schema(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(FIELDS, rng.choice((0, 1, 1, 2, 2, 3, 4)))
    properties = {name: _schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": [n for n in names if rng.random() < 0.7]}


def _schema(rng: Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(KINDS if depth > 0 else KINDS[:7])
    if kind == "object":
        return _object_schema(rng, depth)
    if kind == "array":
        return {"type": "array", "items": _schema(rng, 0)}
    if kind == "enum":
        return {"enum": rng.sample(CHOICES, rng.randrange(2, 4))}
    return {"type": kind}


def _value(rng: Random, schema: dict[str, Any], word: str) -> Any:
    """A short value of a schema: the word of the question where a text is wanted, lists of one to three items."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema["type"]
    if kind == "object":
        required = schema["required"]
        chosen = [name for name in schema["properties"] if name in required or rng.random() < 0.4]
        return {name: _value(rng, schema["properties"][name], word) for name in chosen}
    if kind == "array":
        return [_value(rng, schema["items"], rng.choice(WORDS)) for _ in range(rng.choice((1, 2, 2, 3)))]
    if kind == "integer":
        return rng.choice((1, 2, 3, 5, 7, 10, 12, 42, 100))
    if kind == "number":
        return rng.choice((0.5, 1.5, 2.25, 3.0, 9.75))
    if kind == "boolean":
        return rng.random() < 0.5
    return word
