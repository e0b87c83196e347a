"""Trace contexts: what the specification allows is read, and nothing else. OpenTelemetry's own reader is the twin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.propagation import CURRENT, MAX_CALLS, MAX_MEMBERS, Parent, begin_call, new_span, read_parent

VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, SPAN = int(VALID[3:35], 16), int(VALID[36:52], 16)


def hexes(length: int) -> st.SearchStrategy[str]:
    return st.integers(0, 16**length - 1).map(lambda value: f"{value:0{length}x}")


@st.composite
def nearly_valid(draw: st.DrawFn) -> str:
    """A traceparent, most often with something wrong."""
    version = draw(st.sampled_from(["00", "00", "01", "fe", "ff", "0", "0A"]) | hexes(2))
    trace_id = draw(st.just("0" * 32) | hexes(32) | hexes(31) | hexes(32).map(str.upper))
    span_id = draw(st.just("0" * 16) | hexes(16) | hexes(16) | hexes(17))
    flags = draw(hexes(2) | hexes(1))
    more = draw(st.sampled_from(["", "", "-", "-what", ".x", " ", "\n"]))
    return f"{version}-{trace_id}-{span_id}-{flags}{more}"


@given(nearly_valid() | st.text(max_size=60) | st.just(VALID))
def test_a_traceparent_is_read_as_opentelemetry_reads_it(written: str) -> None:
    context = TraceContextTextMapPropagator().extract({"traceparent": written})
    twin = trace.get_current_span(context).get_span_context()
    found = read_parent([written], [])
    if written.endswith("\n"):  # which no header has
        assert found is None
    elif found is None:
        assert not twin.is_valid
    else:
        assert (found.trace_id, found.span_id, found.sampled) == (twin.trace_id, twin.span_id, twin.trace_flags.sampled)


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8), st.booleans(), st.booleans())
def test_what_is_written_is_what_is_read(trace_id: bytes, span_id: bytes, sampled: bool, with_state: bool) -> None:
    caller = Parent(int.from_bytes(trace_id) or 1, int.from_bytes(span_id) or 1, sampled, "a=b" if with_state else "")
    span = new_span(caller, 0)
    token = CURRENT.set(span)
    call = begin_call("up", "openai", "model")
    CURRENT.reset(token)
    assert call is not None
    headers = {"traceparent": "another", "tracestate": "another"}
    call.write(headers)
    found = read_parent([headers["traceparent"]], [headers["tracestate"]] if "tracestate" in headers else [])
    assert found == Parent(caller.trace_id, call.span_id, sampled, caller.state)
    assert len({caller.span_id, span.span_id, call.span_id}) == 3
    assert ("tracestate" in headers) is with_state


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["a=1,b=2"], "a=1,b=2"),
        (["a=1", "b=2"], "a=1,b=2"),
        ([" a=1 ,\t, b=2 "], "a=1,b=2"),
        (["fw529a3039@dt=FfAhXMoKZw,1a-2@b*/_=x y"], "fw529a3039@dt=FfAhXMoKZw,1a-2@b*/_=x y"),
        ([""], ""),
        (["a=1,a=2"], ""),
        (["A=1"], ""),
        (["a=1=2"], ""),
        (["a="], ""),
        (["a"], ""),
        (["a=ü"], ""),
        ([",".join(f"k{number}=v" for number in range(MAX_MEMBERS))], None),
        ([",".join(f"k{number}=v" for number in range(MAX_MEMBERS + 1))], ""),
        ([f"{'k' * 256}={'v' * 256}"], None),
        ([f"{'k' * 257}=v"], ""),
        ([f"{'k' * 250}{number}={'v' * 256}" for number in range(9)], ""),
        ([f"k={'v' * 257}"], ""),
    ],
)
def test_a_tracestate_is_passed_on_or_dropped_as_a_whole(written: list[str], read: str | None) -> None:
    found = read_parent([VALID], written)
    assert found is not None
    assert found.state == (written[0] if read is None else read)


def test_two_traceparents_are_none() -> None:
    assert read_parent([VALID, VALID], []) is None
    assert read_parent([], ["a=1"]) is None
    assert read_parent([f" {VALID}\t"], []) == Parent(TRACE, SPAN, True)


def test_a_share_of_new_traces_is_sampled_and_the_caller_decides_for_its_own() -> None:
    assert not any(new_span(None, 0).sampled for _ in range(100))
    assert all(new_span(None, 2**64).sampled for _ in range(100))
    sampled = sum(new_span(None, 2**62).sampled for _ in range(4000))
    assert 800 < sampled < 1200  # seven standard deviations
    for decision, bound in ((True, 0), (False, 2**64)):
        assert new_span(Parent(1, 2, decision), bound).sampled is decision


def test_calls_that_become_spans_are_bounded_and_all_carry_the_trace() -> None:
    span = new_span(Parent(1, 2, True), 0)
    token = CURRENT.set(span)
    calls = [begin_call("up", "openai", "model") for _ in range(MAX_CALLS + 5)]
    CURRENT.reset(token)
    assert len(span.calls) == MAX_CALLS
    assert all(call is not None for call in calls)
    assert begin_call("up", "openai", "model") is None
