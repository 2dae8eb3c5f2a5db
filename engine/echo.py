"""Text from outside, fit for a message: short, and on one line."""

from pathlib import Path

MOST = 80


def cut(text: str, most: int = MOST) -> str:
    """`text`, or its beginning with dots after it."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def plain(text: str, most: int = MOST) -> str:
    """`text` cut, with escapes for what does not print or would end the line."""
    return cut("".join(map(_printable, text[: most + 1])), most)


def shown(value: object, most: int = MOST) -> str:
    """`value` as Python writes it, cut."""
    try:
        return cut(ascii(value) if isinstance(value, str) else repr(value), most)
    except (RecursionError, ValueError):  # deeper, or a number with more digits, than Python shows
        return "such a value"


def is_utf8(path: Path) -> bool:
    """Whether the name is text; to the system it is just bytes."""
    return encodable(str(path)) == str(path)


def encodable(text: str) -> str:
    """`text`, fit for UTF-8: a file's name may hold bytes that are no character."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()
