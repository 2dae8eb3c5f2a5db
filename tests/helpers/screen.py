"""What a terminal shows after a program has written to it: just as much as `rich` makes use of."""

import re

_PARTS = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\r\n\b])|([^\x1b])", re.DOTALL)


def screen(raw: str, columns: int) -> list[str]:
    """The lines, without blanks at their ends, after `raw` was written to an endless terminal."""
    lines: list[list[str]] = [[]]
    row = column = 0
    for match in _PARTS.finditer(raw):
        argument, command, control, letter = match.groups()
        if command == "A":
            row = max(0, row - int(argument or 1))
        elif command == "K" and argument == "2":
            lines[row] = []
        elif control == "\r":
            column = 0
        elif control == "\n":
            row += 1
        elif letter:
            if column == columns:
                row, column = row + 1, 0
            _reach(lines, row)
            line = lines[row]
            line.extend(" " * (column + 1 - len(line)))
            line[column] = letter
            column += 1
        _reach(lines, row)
    return ["".join(line).rstrip() for line in lines]


def _reach(lines: list[list[str]], row: int) -> None:
    while len(lines) <= row:
        lines.append([])
