"""The parts of a report: facts in sections, and what each shipped topology lacks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from engine.echo import plain

# absent: not there, and only some topologies need it. problem: there, and does not work.
State: TypeAlias = Literal["ok", "absent", "problem"]


@dataclass(frozen=True)
class Fact:
    """text: for people. value: for programs, JSON. remedy: what to do, where there is something."""

    name: str
    state: State
    text: str
    value: Any = None
    remedy: str | None = None


@dataclass(frozen=True)
class Section:
    name: str
    facts: tuple[Fact, ...]

    def find(self, name: str) -> Fact | None:
        return next((fact for fact in self.facts if fact.name == name), None)


@dataclass(frozen=True)
class Verdict:
    """A shipped topology here. needs: in words. gaps: why it does not run, with the remedies."""

    topology: str
    needs: str
    gaps: tuple[str, ...] = ()
    on_cpu: bool = False

    @property
    def runs(self) -> bool:
        return not self.gaps


@dataclass(frozen=True)
class Report:
    sections: tuple[Section, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def cpu_ready(self) -> bool:
        """Whether a topology without accelerators runs here."""
        return any(verdict.on_cpu and verdict.runs for verdict in self.verdicts)

    def remedies(self) -> list[tuple[str, str]]:
        """What each is about, and what to do: those of problems first."""
        facts = [fact for section in self.sections for fact in section.facts]
        facts.sort(key=lambda fact: fact.state != "problem")
        return [(fact.name, fact.remedy) for fact in facts if fact.remedy]


def section(name: str, looks: Iterable[tuple[str, Callable[[], Iterable[Fact]]]]) -> Section:
    """Runs the `looks`. One that fails is a fact itself, under its name here: whatever is wrong
    with a machine, the rest is still told.
    """
    facts: list[Fact] = []
    for what, look in looks:
        try:
            facts.extend(look())
        except Exception as error:
            reason = plain(str(error) or type(error).__name__, 300)
            facts.append(Fact(what, "problem", f"cannot be read: {reason}"))
    return Section(name, tuple(facts))


def in_units(size: int) -> str:
    """Bytes as 1.5 GiB or 800 MiB."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1000 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.1f} {unit}" if value < 10 and unit != "B" else f"{value:.0f} {unit}"
