"""Reading config.json field by field, with all problems reported together."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from engine.echo import shown
from engine.errors import UsageError

_REQUIRED: Any = object()
# Far above any model, and low enough that no tensor's size in bytes passes 2^63: the largest are
# of two widths, one of them times a count.
MOST_WIDTH = 1 << 22
MOST_COUNT = 1 << 14
MOST_LAYERS = 1 << 10
MOST_TOKENS = 1 << 30


class Fields:
    """Typed access to a JSON object; collects problems instead of stopping at the first.

    A getter that finds a problem notes it and returns a harmless stand-in; `finish` raises
    UsageError with everything that was noted. Null counts as absent.
    """

    def __init__(self, raw: dict[str, Any], path: Path, parent: "Fields | None" = None):
        self.raw = raw
        self.path = path
        self.problems: list[str] = [] if parent is None else parent.problems
        self.conflicts: list[str] = [] if parent is None else parent.conflicts

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def problem(self, text: str) -> None:
        self.problems.append(f"{self.path}: {text}")

    def conflict(self, text: str) -> None:
        """A problem between fields. It counts only where each is right by itself: a stand-in fits
        nothing.
        """
        self.conflicts.append(f"{self.path}: {text}")

    def integer(
        self, key: str, default: int = _REQUIRED, minimum: int = 1, maximum: int = MOST_WIDTH
    ) -> int:
        value = self._get(key, default, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.problem(f"{key} must be a whole number of at least {minimum}, not {shown(value)}")
            return max(1, minimum)
        if value > maximum:
            self.problem(f"{key} {shown(value)} is too large; at most {maximum}")
            return max(1, minimum)
        return value

    def count(self, key: str, default: int = _REQUIRED, minimum: int = 1) -> int:
        """How many there are of something: heads, experts, or features of a head."""
        return self.integer(key, default, minimum, MOST_COUNT)

    def layers(self) -> int:
        return self.integer("num_hidden_layers", maximum=MOST_LAYERS)

    def tokens(self, key: str, default: int = _REQUIRED) -> int:
        """A length in tokens, which sizes no weight."""
        return self.integer(key, default, maximum=MOST_TOKENS)

    def integer_or_null(self, key: str, maximum: int = MOST_WIDTH) -> int | None:
        """For fields in which null means something: they must be there, whatever they say."""
        if key not in self.raw:
            self.problem(f"{key} is missing (it may be null)")
        return self.integer(key, maximum=maximum) if self.has(key) else None

    def number(self, key: str, default: float = _REQUIRED) -> float:
        value = self._get(key, default, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self.problem(f"{key} must be a number above 0 and below 1e30, not {shown(value)}")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool = _REQUIRED) -> bool:
        value = self._get(key, default, False)
        if not isinstance(value, bool):
            self.problem(f"{key} must be true or false, not {shown(value)}")
            return False
        return value

    def choice(self, key: str, allowed: Collection[str], default: str) -> str:
        """The value of `key`, which this engine can honour only when it is one of `allowed`."""
        value = self._get(key, default, default)
        if not isinstance(value, str) or value not in allowed:
            known = ", ".join(sorted(allowed))
            self.problem(f"{key} {shown(value)} is not supported (supported: {known})")
            return default
        return str(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, a single one, or absent (then empty)."""
        value = self.raw.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
            self.problem(f"{key} must be whole numbers, not {shown(value)}")
            return ()
        if any(abs(item) > MOST_TOKENS for item in items):
            self.problem(f"{key} {shown(value)} is too large; at most {MOST_TOKENS}")
            return ()
        return tuple(items)

    def section(self, *keys: str) -> "Fields":
        """The first of `keys` that holds anything, as Fields of its own; empty when none does."""
        for key in keys:
            value = self.raw.get(key)
            if not value:
                continue
            if isinstance(value, dict):
                return Fields(value, self.path, self)
            self.problem(f"{key} must be an object, not {shown(value)}")
        return Fields({}, self.path, self)

    def finish(self) -> None:
        if found := self.problems or self.conflicts:
            raise UsageError("\n".join(dict.fromkeys(found)))

    def _get(self, key: str, default: Any, stand_in: Any) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            self.problem(f"{key} is missing")
            return stand_in
        return default
