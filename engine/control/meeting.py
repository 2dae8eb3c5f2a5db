"""Where ranks find each other to build communicators: a few values, kept while both live. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.control.messages import Message, StoreAsk, StorePut, StoreValues
from engine.topology.ranks import RankId

_BETWEEN = "~"


def communicator_name(*lives: RankId) -> str:
    """The name of a communicator of these lives, in their order."""
    return _BETWEEN.join(_life(life) for life in lives)


def _life(id_: RankId) -> str:
    return f"{id_.role}-{id_.rank}.{id_.incarnation}"


@dataclass(frozen=True)
class _Asker:
    peer: bytes
    ask: StoreAsk


class MeetingPlace:
    """By name of a communicator, the values that its ranks have left for each other."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, bytes]] = {}
        self._askers: list[_Asker] = []

    def handle(self, peer: bytes, message: StorePut | StoreAsk) -> Iterator[tuple[bytes, Message]]:
        """The answers that the message gives rise to, for the sender or for others."""
        there = self._values.setdefault(message.name, {})
        if isinstance(message, StoreAsk):
            self._askers.append(_Asker(peer, message))
        elif message.add:
            there[message.key] = b"%d" % (int(there.get(message.key, b"0")) + int(message.value))
            self._askers.append(_Asker(peer, StoreAsk(message.name, [message.key])))
        else:
            there[message.key] = message.value
        for asker in [a for a in self._askers if a.ask.name == message.name]:
            found = {key: there[key] for key in asker.ask.keys if key in there}
            if len(found) == len(set(asker.ask.keys)) or not asker.ask.wait:
                self._askers.remove(asker)
                yield asker.peer, StoreValues(found)

    def gone(self, id_: RankId) -> None:
        """That life is over, and what it was to be a part of will not be."""
        life = _life(id_)
        for name in [name for name in self._values if life in name.split(_BETWEEN)]:
            del self._values[name]
            self._askers = [asker for asker in self._askers if asker.ask.name != name]
