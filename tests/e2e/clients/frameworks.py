"""Frameworks of others against a gateway: a turn with a tool in each, as their documentation shows it.

    .clients/python/bin/python tests/e2e/clients/frameworks.py NAME URL MODEL [URL MODEL...]

Prints a line of JSON for each backend: what the tool was called with, and what was said behind its result. It runs in
an environment of its own and knows nothing of Kvasir but URLs.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

QUESTION = "How is the weather in London today?"
REPORT = "Rain."
CITIES = ("London", "Berlin", "Paris", "Rome", "Madrid", "Bath")
TOKENS = 100
called: list[str] = []


def get_current_weather(location: str) -> str:
    """The weather in a place."""
    called.append(location)
    return REPORT


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"location": {"type": "string", "maxLength": 40}},
    "required": ["location"],
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_current_weather", "description": "The weather in a place.", "parameters": SCHEMA},
}


def _langchain(chat: Any, forced: str, none: Any = "none") -> str:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    weather = tool(get_current_weather)
    turns: list[Any] = [HumanMessage(QUESTION)]
    turns.append(chat.bind_tools([weather], tool_choice=forced).invoke(turns))
    turns += [weather.invoke(call) for call in turns[-1].tool_calls]
    whole = None
    for chunk in chat.bind_tools([weather], tool_choice=none).stream(turns):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return str(whole.text)


def langchain_openai(url: str, model: str) -> str:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key="any", temperature=0, max_tokens=TOKENS, stream_usage=True
    )
    return _langchain(chat, "required")


def langchain_responses(url: str, model: str) -> str:
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "use_responses_api": True}
    return _langchain(ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="any", **options), "required")


def langchain_anthropic(url: str, model: str) -> str:
    from langchain_anthropic import ChatAnthropic

    return _langchain(
        ChatAnthropic(model=model, base_url=url, api_key="any", temperature=0, max_tokens=TOKENS),
        "any",
        {"type": "none"},
    )


def llama_index(url: str, model: str) -> str:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key="any",
        temperature=0,
        max_tokens=TOKENS,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    weather = FunctionTool.from_defaults(get_current_weather)
    turns = [ChatMessage(role="user", content=QUESTION)]
    answer = llm.chat_with_tools([weather], chat_history=turns, tool_required=True)
    turns.append(answer.message)
    for call in llm.get_tool_calls_from_response(answer):
        result = weather(**call.tool_kwargs)
        turns.append(ChatMessage(role="tool", content=str(result), additional_kwargs={"tool_call_id": call.tool_id}))
    return "".join(chunk.delta or "" for chunk in llm.stream_chat(turns))


def litellm(url: str, model: str) -> str:
    """In all three dialects, each with the whole message of the turn before sent back."""
    from litellm import completion

    said = ""
    for api, path in (("openai", "/v1"), ("anthropic", ""), ("gemini", "/v1beta")):
        options: dict[str, Any] = {"model": f"{api}/{model}", "api_base": url + path, "api_key": "any"}
        options |= {"temperature": 0, "max_tokens": TOKENS}
        marked = [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]
        turns: list[Any] = [{"role": "user", "content": marked}]
        first = completion(messages=turns, tools=[TOOL], tool_choice="required", **options).choices[0].message
        turns.append(first)
        for call in first.tool_calls:
            result = get_current_weather(json.loads(call.function.arguments)["location"])
            turns.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})
        chunks = completion(messages=turns, tools=[TOOL], tool_choice="none", stream=True, **options)
        answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert answer, api
        said += answer
    return said


def _pydantic(model: Any) -> str:
    from pydantic_ai import Agent

    def settings(context: Any) -> Any:
        return {"temperature": 0, "max_tokens": TOKENS, "tool_choice": "required" if context.run_step <= 1 else "none"}

    agent = Agent(
        model, instructions="You are a helpful assistant.", tools=[get_current_weather], model_settings=settings
    )
    return str(agent.run_sync(QUESTION).output)


def pydantic_ai_openai(url: str, model: str) -> str:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return _pydantic(OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="any")))


def pydantic_ai_anthropic(url: str, model: str) -> str:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    return _pydantic(AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="any")))


def pydantic_ai_google(url: str, model: str) -> str:
    from pydantic_ai.models.google import GoogleModel
    from pydantic_ai.providers.google import GoogleProvider

    return _pydantic(GoogleModel(model, provider=GoogleProvider(base_url=url, api_key="any")))


def _agents(model: Any) -> str:
    from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    settings = ModelSettings(tool_choice="required", temperature=0, max_tokens=TOKENS)
    plain = Agent(name="plain", model=model, model_settings=ModelSettings(max_tokens=16))  # sends `tools: []`
    assert Runner.run_sync(plain, QUESTION).final_output
    agent = Agent(name="agent", model=model, tools=[function_tool(get_current_weather)], model_settings=settings)
    return str(Runner.run_sync(agent, QUESTION, max_turns=4).final_output)


def openai_agents_responses(url: str, model: str) -> str:
    from agents import OpenAIResponsesModel
    from openai import AsyncOpenAI

    return _agents(OpenAIResponsesModel(model, AsyncOpenAI(base_url=f"{url}/v1", api_key="any")))


def openai_agents_chat(url: str, model: str) -> str:
    from agents import OpenAIChatCompletionsModel
    from openai import AsyncOpenAI

    return _agents(OpenAIChatCompletionsModel(model, AsyncOpenAI(base_url=f"{url}/v1", api_key="any")))


def instructor(url: str, model: str) -> str:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel, Field

    class Place(BaseModel):
        location: str = Field(max_length=40)

    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="any"), mode=instructor.Mode.TOOLS)
    answer = client.chat.completions.create(
        model=model,
        response_model=Place,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=TOKENS,
        temperature=0,
    )
    get_current_weather(answer.location)
    return REPORT


def dspy(url: str, model: str) -> str:
    import dspy

    class Ask(dspy.Signature):
        """Answers with a tool."""

        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        calls: dspy.ToolCalls = dspy.OutputField()

    class Model(dspy.LM):
        supports_function_calling = True  # it has a list of models that can; ours is not on it

    lm = Model(f"openai/{model}", api_base=f"{url}/v1", api_key="any", temperature=0, max_tokens=TOKENS, cache=False)
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    weather = dspy.Tool(get_current_weather)
    with dspy.context(lm=lm, adapter=adapter):
        found = dspy.Predict(Ask)(question=QUESTION, tools=[weather], config={"tool_choice": "required"})
    for call in found.calls.tool_calls:
        weather(**call.args)
    return REPORT


def llm(url: str, model: str) -> str:
    import os
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLM_USER_PATH"] = folder
        entry = {"model_id": "ours", "model_name": model, "api_base": f"{url}/v1", "supports_tools": True}
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([entry]))
        import llm

        text = ""
        for city in CITIES:  # it cannot require a call, and the model makes one for most of these
            chat, options = llm.get_model("ours").conversation(), {"temperature": 0, "max_tokens": TOKENS}
            chain = chat.chain(QUESTION.replace("London", city), tools=[get_current_weather], options=options)
            text = chain.text()
            if called:
                break
        return text


CLIENTS: dict[str, Callable[[str, str], str]] = {
    one.__name__: one
    for one in (
        langchain_openai,
        langchain_responses,
        langchain_anthropic,
        llama_index,
        litellm,
        pydantic_ai_openai,
        pydantic_ai_anthropic,
        pydantic_ai_google,
        openai_agents_responses,
        openai_agents_chat,
        instructor,
        dspy,
        llm,
    )
}


def main() -> None:
    name, *backends = sys.argv[1:]
    for url, model in zip(backends[::2], backends[1::2], strict=True):
        called.clear()
        text = CLIENTS[name](url, model)
        sys.stdout.write(json.dumps({"called": called, "text": text}) + "\n")


if __name__ == "__main__":
    main()
