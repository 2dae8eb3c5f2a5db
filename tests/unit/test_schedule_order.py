from hypothesis import given
from hypothesis import strategies as st

from engine.schedule.order import RoundRobin


def test_groups_take_turns_and_keep_their_own_order() -> None:
    queue = RoundRobin[str]()
    for group, item in [(2, "c1"), (0, "a1"), (0, "a2"), (2, "c2"), (1, "b1")]:
        queue.push(group, item)
    assert [queue.pop() for _ in range(6)] == ["a1", "b1", "c1", "a2", "c2", None]


def test_turn_is_kept_while_nothing_is_ready() -> None:
    queue = RoundRobin[str]()
    queue.push(0, "a1")
    assert queue.pop() == "a1"
    assert queue.pop() is None
    queue.push(0, "a2")
    queue.push(1, "b1")
    assert queue.pop() == "b1"  # group 0 was served last


@given(st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=80))
def test_a_ready_item_waits_for_at_most_one_item_of_each_other_group(
    events: list[int | None],
) -> None:
    """None serves an item; a number makes one of that group ready."""
    queue = RoundRobin[tuple[int, int]]()
    ready: dict[int, list[int]] = {group: [] for group in range(5)}
    skipped = {group: [0] * 5 for group in range(5)}  # since the group was served last or empty
    for number, event in enumerate(events):
        if event is not None:
            queue.push(event, (event, number))
            if not ready[event]:
                skipped[event] = [0] * 5
            ready[event].append(number)
            continue
        item = queue.pop()
        assert (item is None) == (not any(ready.values()))
        if item is None:
            continue
        served, serial = item
        assert ready[served].pop(0) == serial
        skipped[served] = [0] * 5
        for group in range(5):
            if group != served and ready[group]:
                skipped[group][served] += 1
                assert skipped[group][served] <= 1
    assert len(queue) == sum(map(len, ready.values()))
