"""Text from outside, fit for a message: short, and on one line."""

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


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()
