"""Requests to our own engines, as the response cache sees them (Asked in base.py). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import Hello
from gateway.responses.base import Situation
from gateway.responses.key import find_situation, request_key
from gateway.types import ChatPrompt, Request, Reuse, Scope


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class EngineAsked:
    """See Asked. `hello` is the model's."""

    request: Request
    hello: Hello
    key: bytes
    owner: str

    @classmethod
    def of(cls, request: Request, hello: Hello) -> EngineAsked:
        scope = request.scope or Scope(tenant=request.tenant.name)
        return cls(request, hello, request_key(request, hello), owner_of(scope))

    @property
    def tenant(self) -> str:
        return self.request.tenant.name

    @property
    def model(self) -> str:
        return self.request.model

    @property
    def reuse(self) -> Reuse:
        return self.request.reuse

    @property
    def work(self) -> int:
        return self.request.work

    def find_unfit(self, max_temperature: float) -> str | None:
        """See Asked."""
        request = self.request
        prompt = request.prompt
        if request.tool_use is not None or (isinstance(prompt, ChatPrompt) and prompt.tools):
            return "tools"
        if request.constraint is not None or request.sampling.logprobs is not None or request.group is not None:
            return "form"
        return "sampling" if request.sampling.temperature > max_temperature else None

    def find_situation(self) -> Situation | None:
        """See Asked."""
        return find_situation(self.request, self.hello)


def owner_of(scope: Scope) -> str:
    """Whose answers those of a scope are, as stores and operators know it. What clients separate theirs with is in the
    key alone."""
    return f"namespace:{scope.namespace}" if scope.namespace else f"tenant:{scope.tenant}"
