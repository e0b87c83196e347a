"""When two answers are taken for the same; what cannot be told is taken for different."""

from __future__ import annotations

from array import array

import pytest

from gateway.responses.semantic import judge

LONG = "The process starts when the user opens the page and then reads what it says about the account. " * 4


@pytest.mark.parametrize(("one", "other"), [("Paris.", "paris"), ("It is\n42.", "It is 42"), (LONG, LONG.upper())])
def test_answers_that_differ_in_case_space_and_punctuation_are_the_same(one: str, other: str) -> None:
    assert judge.compare(one, other) is True


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Yes.", "No."),
        ("Yes.", "Yes, indeed."),
        ("", ""),
        ("You may take 5 mg of it every day.", "You may take 50 mg of it every day."),
        ("You should take it with food.", "You should not take it with food."),
        ("The capital of it is Paris in the north.", "The capital of it is Lyon in the north."),
        (LONG + "It costs 5, 6 and 7 euros.", LONG + "It costs 8, 9 and 10 euros."),
        (LONG + "You can pay it later.", LONG + "You cannot pay it later."),
        (LONG + "The train leaves after 5 minutes.", LONG + "The train leaves after 9 minutes."),
        (LONG + "He was born in Paris in the spring.", LONG + "He was born in Lyon in the spring."),
        (
            LONG + "Bring the teacher an old key of the white house.",
            LONG + "Bring the driver an old key of the white house.",
        ),
        ("Bring the teacher an old key of the white house.", "Bring the driver an old key of the white house."),
        (LONG + "See `a.py` and `b.py` there.", LONG),
    ],
)
def test_answers_that_say_other_things_never_reach_their_vectors(one: str, other: str) -> None:
    assert judge.compare(one, other) is False


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Click on the link and choose another password.", "There is a link behind which passwords can be set."),
        (LONG + "It is not hard.", LONG),
        (LONG + "It costs 5 euros, or 6.", LONG + "6 euros, or 5."),
        (LONG + "You can pay later. You cannot pay now.", "Certainly! You cannot pay now. You can pay later. " + LONG),
    ],
)
def test_of_answers_in_other_words_the_vectors_decide(one: str, other: str) -> None:
    assert judge.compare(one, other) is None


def test_near_is_a_cosine() -> None:
    def vector(*values: float) -> bytes:
        return array("f", values).tobytes()

    assert judge.near(vector(1, 0), vector(0.86, 0.51))
    assert not judge.near(vector(1, 0), vector(0.84, 0.54))
