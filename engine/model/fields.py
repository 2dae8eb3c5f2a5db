"""Reading config.json field by field, with all problems reported together."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from engine.errors import UsageError

_REQUIRED: Any = object()


class Fields:
    """Typed access to a JSON object; collects problems instead of stopping at the first.

    A getter that finds a problem notes it and returns a harmless stand-in; `finish` raises
    UsageError with everything that was noted. Null counts as absent.
    """

    def __init__(self, raw: dict[str, Any], path: Path, problems: list[str] | None = None):
        self.raw = raw
        self.path = path
        self.problems: list[str] = [] if problems is None else problems

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def problem(self, text: str) -> None:
        self.problems.append(f"{self.path}: {text}")

    def integer(self, key: str, default: int = _REQUIRED, minimum: int = 1) -> int:
        value = self._get(key, default, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.problem(f"{key} must be a whole number of at least {minimum}, not {value!r}")
            return max(1, minimum)
        return value

    def integer_or_null(self, key: str) -> int | None:
        """For fields in which null means something: they must be there, whatever they say."""
        if key not in self.raw:
            self.problem(f"{key} is missing (it may be null)")
        return self.integer(key) if self.has(key) else None

    def number(self, key: str, default: float = _REQUIRED) -> float:
        value = self._get(key, default, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.problem(f"{key} must be a number above 0, not {value!r}")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool = _REQUIRED) -> bool:
        value = self._get(key, default, False)
        if not isinstance(value, bool):
            self.problem(f"{key} must be true or false, not {value!r}")
            return False
        return value

    def choice(self, key: str, allowed: Collection[str], default: str) -> str:
        """The value of `key`, which this engine can honour only when it is one of `allowed`."""
        value = self._get(key, default, default)
        if value not in allowed:
            known = ", ".join(sorted(allowed))
            self.problem(f"{key} {value!r} is not supported (supported: {known})")
            return default
        return str(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, a single one, or absent (then empty)."""
        value = self.raw.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
            self.problem(f"{key} must be whole numbers, not {value!r}")
            return ()
        return tuple(items)

    def section(self, *keys: str) -> "Fields":
        """The first of `keys` that holds anything, as Fields of its own; empty when none does."""
        for key in keys:
            value = self.raw.get(key)
            if not value:
                continue
            if isinstance(value, dict):
                return Fields(value, self.path, self.problems)
            self.problem(f"{key} must be an object, not {value!r}")
        return Fields({}, self.path, self.problems)

    def finish(self) -> None:
        if self.problems:
            raise UsageError("\n".join(dict.fromkeys(self.problems)))

    def _get(self, key: str, default: Any, stand_in: Any) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            self.problem(f"{key} is missing")
            return stand_in
        return default
