"""Who pays for a generation that several share: nothing is paid twice, and nothing by nobody."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.responses.flights import Bill
from gateway.types import Trace


def joined(bill: Bill, count: int) -> list[Trace]:
    traces = [Trace() for _ in range(count)]
    for trace in traces:
        bill.join(trace)
    return traces


def begin(bill: Bill) -> None:
    bill.work.engine, bill.work.prompt_tokens, bill.work.first_token_ms = "engine-1", 10, 1.0


def paid(trace: Trace) -> tuple[int, int]:
    """Tokens of the prompt and of the completion that are on its account."""
    return trace.prompt_tokens, trace.completion_tokens if trace.engine else trace.paid_tokens


def test_who_is_alone_pays_everything_also_when_it_leaves_before_the_first_token() -> None:
    bill = Bill()
    (alone,) = joined(bill, 1)
    bill.work.engine, bill.work.prompt_tokens = "engine-1", 10
    bill.leave(alone)
    assert (alone.engine, alone.prompt_tokens) == ("engine-1", 10)


def test_when_the_first_one_leaves_the_next_one_pays_the_rest() -> None:
    bill = Bill()
    first, second, third = joined(bill, 3)
    begin(bill)
    bill.work.completion_tokens = 3
    bill.leave(first)
    bill.work.completion_tokens = 8
    bill.leave(third)
    bill.leave(second)
    assert [paid(one) for one in (first, second, third)] == [(10, 3), (0, 5), (0, 0)]


def test_who_leaves_before_the_first_token_leaves_all_of_it_to_the_next() -> None:
    bill = Bill()
    first, second = joined(bill, 2)
    bill.work.engine = "engine-1"
    bill.leave(first)
    assert (first.engine, bill.leads(second)) == (None, True)
    begin(bill)
    bill.work.completion_tokens = 2
    bill.leave(second)
    assert [paid(one) for one in (first, second)] == [(0, 0), (10, 2)]


def test_what_is_a_requests_own_stays_so() -> None:
    bill = Bill()
    (alone,) = joined(bill, 1)
    alone.fork = True
    begin(bill)
    bill.leave(alone)
    assert alone.fork
    bill.work.completion_tokens = 7
    bill.leave(alone)
    assert alone.completion_tokens == 0, "it has left"


@given(
    st.lists(st.one_of(st.just("join"), st.just("begin"), st.integers(1, 5), st.integers(-8, -1)), max_size=40),
)
def test_every_token_is_paid_by_one_who_was_there(steps: list[str | int]) -> None:
    """Negative numbers: a reader leaves, and who is there for longest is -1. When nobody is left it is over."""
    bill = Bill()
    here, gone = joined(bill, 1), []
    begun, computed = False, 0
    for step in steps:
        if not here:
            break
        if step == "join":
            here += joined(bill, 1)
        elif step == "begin":
            begin(bill)
            begun = True
        elif isinstance(step, int) and step > 0 and begun:
            computed += step
            bill.work.completion_tokens = computed
        elif isinstance(step, int) and step < 0:
            gone.append(here.pop(-step % len(here)))
            bill.leave(gone[-1])
    for trace in here:
        bill.leave(trace)
    accounts = [paid(trace) for trace in (*gone, *here)]
    assert sum(prompt for prompt, _ in accounts) == 10 * begun
    assert sum(completion for _, completion in accounts) == computed
