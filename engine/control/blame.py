"""What becomes of work when ranks die. Pure accounts, no clock.

A batch whose rank died while computing it is run again as it was. After two such deaths its
prompts are run one by one, and a prompt that has seen three deaths alone is given up. So a prompt
that kills its rank takes no other with it, and a rank that dies by chance costs nobody an answer.
"""

from enum import Enum, auto

from engine.schedule.types import Batch
from engine.topology.ranks import RankId, Role

DEATHS_TOGETHER = 2
DEATHS_ALONE = 3
DEATHS_IN_A_ROW = 3
# One prompt may explain so many deaths in a row; more are the rank's own.
_EXPLAINED = DEATHS_TOGETHER + DEATHS_ALONE


class Verdict(Enum):
    """What to do with a batch: run it again, run its prompts one by one, or give its prompt up."""

    AGAIN = auto()
    ALONE = auto()
    GIVE_UP = auto()


class Blame:
    """Counts deaths, by what was being computed and by who died."""

    def __init__(self) -> None:
        self._deaths: dict[int, int] = {}  # of the batch with this id
        self._suspects: set[int] = set()  # keys of prompts that were being computed at a death
        self._in_a_row: dict[tuple[Role, int], int] = {}
        self._unexplained: dict[tuple[Role, int], int] = {}

    def judge(self, batch: Batch, company: bool = False) -> Verdict:
        """A rank died while computing `batch`. company: and others with it."""
        self._suspects.update(segment.key for segment in batch.segments)
        deaths = self._deaths.get(batch.id, 0) + 1
        self._deaths[batch.id] = deaths
        if len(batch.segments) == 1 and not company:
            return Verdict.GIVE_UP if deaths >= DEATHS_ALONE else Verdict.AGAIN
        return Verdict.ALONE if deaths >= DEATHS_TOGETHER else Verdict.AGAIN

    def settled(self, batch: Batch) -> None:
        """`batch` will not run again: it is done, given up, or taken apart."""
        self._deaths.pop(batch.id, None)

    def cleared(self, key: int) -> None:
        """The prompt is answered, one way or the other."""
        self._suspects.discard(key)

    def hopeless(self, rank: RankId, proven: bool, *batches: Batch) -> bool:
        """A life of `rank` ended while computing `batches` (before `judge`). proven: it had
        finished work before, or been there for long.

        True when it died too often in a row without finishing anything. Deaths that a suspected
        prompt explains count apart.
        """
        who = rank.role, rank.rank
        explained = any(s.key in self._suspects for b in batches for s in b.segments)
        if proven:
            self._in_a_row[who] = self._unexplained[who] = 0
            return False
        self._in_a_row[who] = self._in_a_row.get(who, 0) + 1
        self._unexplained[who] = self._unexplained.get(who, 0) + (not explained)
        return self._unexplained[who] >= DEATHS_IN_A_ROW or self._in_a_row[who] > _EXPLAINED
