"""Chat templates that write tool calls as real families of models do, with tokenisers of the fitting shapes.

Written for these tests after what the families' own templates render; shorter, and without their instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer

from engine.demo import MODEL_DIR
from engine.protocol import TokenizerFiles
from tests.fakes import tokenisers

QWEN = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}
{%- if call.function %}{% set call = call.function %}{% endif %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
THINKING = QWEN.replace(
    "'<|im_start|>assistant\\n' }}{% endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
HERMES = """\
{{- bos_token }}
{%- macro kind(of) %}{{ {'string': 'str', 'integer': 'int'}.get(of, 'Any') }}{% endmacro %}
{%- if tools is defined and tools %}
{{- '<|im_start|>system\\nYou may call: ' }}
{%- for tool in tools %}{{ tool.function.name + ': ' + tool.function.description }}(
{%- for name, of in tool.function.parameters.properties.items() %}{{ name }}: {{ kind(of.type) }}, {% endfor %})
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['tool_calls'] is defined %}
{%- for call in message['tool_calls'] %}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- if not loop.last %}{{ '\\n' }}{% endif %}
{%- endfor %}
{%- else %}{{ message['content'] }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model makes one call at a time.') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and message.role == 'user' and loop.first %}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.first %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- set out = call.function | tojson %}
{{- out[:-1] }}
{%- if call.id | length != 9 %}{{ raise_exception('Ids of calls have nine characters.') }}{% endif %}
{{- ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}{{ ', ' }}{% else %}{{ ']' + eos_token }}{% endif %}
{%- endfor %}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}
"""

_CHAT = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}CALLS"
_CHAT += "{% endfor %}"
_CHAT += "{{ tools }}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_EACH = "{% for call in message.tool_calls or [] %}{% set f = call.function %}WRITE{% endfor %}"
UNKNOWN = {
    "names in tags": "{{ '<tool_call>\\n<function=' + f.name + '>\\n</function>\\n</tool_call>' }}",
    "arguments behind a marker": "{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson) }}",
    "python": "{{ '[' + f.name + '()]' }}",
    "channels": "{{ '<|channel|>commentary to=' + f.name + '<|message|>' + (f.arguments | tojson) + '<|call|>' }}",
    "a marker before bare json": "{{ '<|tool|>' + (f | tojson) }}",
    "nothing": "",
}
"""Ways to write calls that are not read."""


def unknown(name: str) -> str:
    return _CHAT.replace("CALLS", _EACH.replace("WRITE", UNKNOWN[name]))


@lru_cache
def qwen() -> TokenizerFiles:
    """<tool_call> is an added token that is not special."""
    return replace(tokenisers.qwen(), chat_template=QWEN)


@lru_cache
def thinking() -> TokenizerFiles:
    return replace(tokenisers.qwen(), chat_template=THINKING)


@lru_cache
def hermes() -> TokenizerFiles:
    """<tool_call> is a special token."""
    return _with(tokenisers.llama3(), HERMES, "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")


@lru_cache
def llama3() -> TokenizerFiles:
    return _with(tokenisers.llama3(), LLAMA3, "<|python_tag|>", "<|eom_id|>")


@lru_cache
def mistral() -> TokenizerFiles:
    return _with(tokenisers.llama2(), MISTRAL, *_MISTRAL)


@lru_cache
def tekken() -> TokenizerFiles:
    """A later Mistral: byte-level, and no blank behind the marker."""
    template = MISTRAL.replace("[TOOL_CALLS] [", "[TOOL_CALLS][")
    files = _with(tokenisers.llama3(), template, *_MISTRAL)
    return replace(files, special_tokens={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"})


@lru_cache
def demo() -> TokenizerFiles:
    read = {name: (MODEL_DIR / name).read_text(encoding="utf-8") for name in ("tokenizer.json", "chat_template.jinja")}
    return TokenizerFiles(read["tokenizer.json"], read["chat_template.jinja"], {}, add_bos=False)


_MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")

ALL: dict[str, Callable[[], TokenizerFiles]] = {
    "qwen": qwen,
    "thinking": thinking,
    "hermes": hermes,
    "llama3": llama3,
    "mistral": mistral,
    "tekken": tekken,
    "demo": demo,
}


def _with(files: TokenizerFiles, template: str, *specials: str) -> TokenizerFiles:
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return replace(files, tokenizer_json=tokenizer.to_str(), chat_template=template)
