"""In which order an expert rank serves the work that is ready."""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class RoundRobin(Generic[Item]):
    """Ready items by attention group: first come first served within a group, and the groups in
    turn, starting after the one served last. A group that floods waits as long as any other.
    """

    def __init__(self) -> None:
        self._ready: dict[int, deque[Item]] = {}
        self._last = -1

    def __len__(self) -> int:
        return sum(len(items) for items in self._ready.values())

    def __iter__(self) -> Iterator[Item]:
        for items in self._ready.values():
            yield from items

    def push(self, group: int, item: Item) -> None:
        """`item` of `group` (0 or more) became ready."""
        self._ready.setdefault(group, deque()).append(item)

    def pop(self) -> Item | None:
        """The item to serve now, or None when nothing is ready."""
        waiting = [group for group, items in self._ready.items() if items]
        if not waiting:
            return None
        last = self._last
        group = min(waiting, key=lambda group: (group <= last, group))
        self._last = group
        return self._ready[group].popleft()
