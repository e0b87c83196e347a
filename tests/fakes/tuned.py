"""Settings with other constants than theirs: those that no operator turns, but a test does."""

from __future__ import annotations

from typing import Any, TypeVar

from engine.config import Section

PATIENT = {"step_ms": 1e9, "prefill_per_decode": 1e9}
"""Of an engine whose steps are as large as step_tokens, however long they take: what a step computes is known."""

_Section = TypeVar("_Section", bound=Section)


def tuned(section: type[_Section], **values: Any) -> _Section:
    """Settings of `section` with these values, of which some are constants of it."""
    fields = {name: value for name, value in values.items() if name in section.model_fields}
    changed: Any = type(
        section.__name__, (section,), {"__module__": __name__, "model_config": {"use_attribute_docstrings": False}}
    )
    for name in values.keys() - fields.keys():
        assert hasattr(section, name), f"{section.__name__} has no constant {name}"
        setattr(changed, name, values[name])
    made: _Section = changed(**fields)
    return made
