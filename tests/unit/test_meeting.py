"""Where ranks meet to build communicators: what is put, asked for, added up, and forgotten."""

from engine.control.meeting import MeetingPlace, communicator_name
from engine.control.messages import Message, StoreAsk, StorePut, StoreValues
from engine.topology.ranks import RankId

A, B = RankId("attention", 0), RankId("expert", 1, 3)
NAME = communicator_name(A, B)


def handled(place: MeetingPlace, peer: bytes, message: StorePut | StoreAsk) -> list[object]:
    found: list[tuple[bytes, Message]] = list(place.handle(peer, message))
    return [(to, answer.values) for to, answer in found if isinstance(answer, StoreValues)]


def test_a_name_tells_who_and_which_life() -> None:
    assert NAME == "attention-0.0~expert-1.3"
    assert communicator_name(B, A) != NAME


def test_who_asks_is_answered_when_all_is_there() -> None:
    place = MeetingPlace()
    assert handled(place, b"b", StoreAsk(NAME, ["x", "y"])) == []
    assert handled(place, b"a", StorePut(NAME, "x", b"1")) == []
    assert handled(place, b"a", StorePut("another", "y", b"9")) == []
    assert handled(place, b"a", StorePut(NAME, "y", b"2")) == [(b"b", {"x": b"1", "y": b"2"})]
    assert handled(place, b"c", StoreAsk(NAME, ["y"])) == [(b"c", {"y": b"2"})]


def test_who_does_not_wait_hears_what_there_is() -> None:
    place = MeetingPlace()
    handled(place, b"a", StorePut(NAME, "x", b"1"))
    asked = StoreAsk(NAME, ["x", "y"], wait=False)
    assert handled(place, b"b", asked) == [(b"b", {"x": b"1"})]


def test_numbers_are_added_up() -> None:
    place = MeetingPlace()
    for expected in (b"2", b"4"):
        put = StorePut(NAME, "n", b"2", add=True)
        assert handled(place, b"a", put) == [(b"a", {"n": expected})]


def test_what_belongs_to_a_life_that_is_over_is_forgotten() -> None:
    place = MeetingPlace()
    handled(place, b"a", StorePut(NAME, "x", b"1"))
    handled(place, b"b", StoreAsk(NAME, ["y"]))
    place.gone(RankId("expert", 1, 2))  # an earlier one
    assert handled(place, b"c", StoreAsk(NAME, ["x"])) == [(b"c", {"x": b"1"})]
    place.gone(B)
    assert handled(place, b"a", StorePut(NAME, "y", b"2")) == []
    assert handled(place, b"c", StoreAsk(NAME, ["x"], wait=False)) == [(b"c", {})]
