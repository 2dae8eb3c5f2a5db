"""What single tokens stand for: their bytes, and text where those bytes are text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec


class Piece(msgspec.Struct, frozen=True):
    """A token by itself.

    text: U+FFFD stands for what is not UTF-8 by itself. data: its bytes, where they can be told.
    special: marks structure and is no text of an answer. known: False for a mere stand-in.
    """

    text: str
    data: bytes | None
    special: bool = False
    known: bool = True

    @property
    def key(self) -> str:
        """A text that keeps apart tokens which are only parts of a character, as OpenAI's does."""
        if self.data is None:
            return self.text
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


def from_bytes(data: bytes) -> Piece:
    return Piece(data.decode(errors="replace"), data)


def special(text: str) -> Piece:
    return Piece(text, text.encode(), special=True)


def unknown(token_id: int) -> Piece:
    """For an id that the tokenizer does not have, or when there is no tokenizer."""
    return Piece(f"token_id:{token_id}", None, known=False)


def byte_reader(tokenizer_json: Path) -> Callable[[str], bytes]:
    """How a vocabulary entry of this tokenizer.json becomes bytes, judged by its decoder.

    Byte-level vocabularies write each byte as one printable character; SentencePiece ones write a
    space as U+2581 and bytes that are not in the vocabulary as `<0x0A>`.
    """
    decoder = json.loads(tokenizer_json.read_bytes()).get("decoder")
    if "ByteLevel" in _decoder_types(decoder):
        table = _byte_level_table()

        def byte_level(entry: str) -> bytes:
            if all(character in table for character in entry):
                return bytes(table[character] for character in entry)
            return entry.encode()

        return byte_level
    return _sentence_piece


def _sentence_piece(entry: str) -> bytes:
    if len(entry) == 6 and entry.startswith("<0x") and entry.endswith(">"):
        try:
            return bytes([int(entry[3:5], 16)])
        except ValueError:
            pass
    return entry.replace("\u2581", " ").encode()


def _decoder_types(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    types = {str(decoder.get("type"))}
    for part in decoder.get("decoders", []):
        types |= _decoder_types(part)
    return types


def _byte_level_table() -> dict[str, int]:
    """Character -> byte. Printable Latin-1 bytes are themselves; the others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }
