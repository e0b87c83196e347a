"""The forms of all APIs that requests are translated into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.upstreams.translation.anthropic import AnthropicMessages
from gateway.upstreams.translation.base import Form
from gateway.upstreams.translation.gemini import GeminiGenerate
from gateway.upstreams.translation.openai_chat import OpenAIChat
from gateway.upstreams.translation.openai_responses import OpenAIResponses

FORMS: Final[Sequence[Form]] = (OpenAIChat(), OpenAIResponses(), AnthropicMessages(), GeminiGenerate())
