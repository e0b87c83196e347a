"""Where an end-to-end test of the bundled engine does not hold for a vLLM of others, and why.

docs/fleet.md has the same reasons; test_differences.py compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PAGES: Final = "The figures of its inside that the bundled engine shows (sharing of prefills, tiers)"
SLOW: Final = "Nothing: the test measures time or fills the context, for which a vLLM on a CPU is too slow"
START: Final = "What `kvasir serve` says at its start of the bundled model"

DIFFERENT: Final[Mapping[str, str]] = {
    "test_the_start_says_what_runs_and_how_to_use_it": START,
    "test_eight_answers_compute_their_prompt_once": PAGES,
    "test_as_much_as_the_context_has_room_for": SLOW,
    "test_fifty_streams_of_all_dialects_at_once_equal_their_whole_answers": SLOW,
    "test_the_first_token_comes_no_sooner_for_what_another_tenant_has_asked": SLOW,
    "test_what_is_in_which_tier_is_in_the_stats_and_the_metrics": PAGES,
    "test_leases_are_in_the_stats_and_the_metrics": PAGES,
    "test_tools_and_tool_calls_are_cached": SLOW,
}
"""Tests that are skipped with replicas -> what is not there."""

REFUSED: Final = (
    "A grammar that cannot be carried out is a 400 that names the field; the bundled engine also names the place in it",
    "Cached tokens come in whole blocks of the server",
)
"""Other differences, to which tests of both have one line."""
