"""Text -> token ids and back, by the checkpoint's own tokenizer.

`tokenizers` reads tokenizer.json. Checkpoints without one go through transformers where that is
installed; otherwise only prompts given as token ids can run, and `reason` says why.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from engine.api import pieces
from engine.api.chat_template import ChatTemplate, load_chat_template, special_tokens
from engine.api.pieces import Piece
from engine.api.types import RequestError
from engine.errors import UsageError


class Codec(Protocol):
    """The few things that are asked of a tokenizer library."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def piece(self, token_id: int) -> Piece: ...


class Tokenizer:
    """A checkpoint's tokenizer and chat template, or the reasons why it has none."""

    def __init__(self, codec: Codec | str, template: ChatTemplate | str) -> None:
        """codec, template: text stands for a missing one and says why."""
        self._codec = codec
        self._template = template
        self._pieces: dict[int, Piece] = {}  # no larger than the vocabulary

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises RequestError when the checkpoint has no tokenizer."""
        return self._readable().encode(text, add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        options: dict[str, Any] | None = None,
    ) -> list[int]:
        """Raises RequestError: no tokenizer, no template, or messages that it refuses."""
        codec = self._readable()
        if isinstance(self._template, str):
            raise RequestError(self._template, param="messages", code="no_chat_template")
        text = self._template.render(
            messages, add_generation_prompt=add_generation_prompt, options=options
        )
        # The template writes the special tokens itself.
        return codec.encode(text, add_special_tokens=False)

    def piece(self, token_id: int) -> Piece:
        """The token by itself; a stand-in text where nothing is known of it."""
        known = self._pieces.get(token_id)
        if known is None:
            codec = self._codec
            known = pieces.unknown(token_id) if isinstance(codec, str) else codec.piece(token_id)
            self._pieces[token_id] = known
        return known

    def _readable(self) -> Codec:
        if isinstance(self._codec, str):
            raise RequestError(
                f"{self._codec}; only prompt_token_ids can be used", code="no_tokenizer"
            )
        return self._codec


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Raises UsageError when a tokenizer file is there but cannot be read."""
    config = _read_config(model_dir / "tokenizer_config.json")
    file = model_dir / "tokenizer.json"
    codec: Codec | str
    if file.is_file():
        try:
            codec = _FastCodec(file, config)
        except Exception as error:  # `tokenizers` raises bare Exceptions
            raise UsageError(
                f"{file}: not a tokenizer: {error}. Copy it from the model's repository again"
            ) from None
    else:
        codec = _transformers_codec(model_dir)
    return Tokenizer(codec, load_chat_template(model_dir, config))


class _FastCodec:
    """tokenizer.json, with the bos token that tokenizer_config.json may ask for on top."""

    def __init__(self, file: Path, config: dict[str, Any]) -> None:
        # One text at a time gains nothing from threads, and forking after they ran is a warning.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        # Left over from training or export; a prompt is neither cut nor filled up here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._to_bytes = pieces.byte_reader(file)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = {token_id for token_id, token in added.items() if token.special}
        bos = special_tokens(config).get("bos_token") if config.get("add_bos_token") else None
        self._bos: int | None = self._tokenizer.token_to_id(bos) if bos else None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Unlike encode, it leaves other threads free to run and computes no offsets.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        if add_special_tokens and self._bos is not None and ids[:1] != [self._bos]:
            ids = [self._bos, *ids]
        return ids

    def piece(self, token_id: int) -> Piece:
        if token_id in self._special:
            return pieces.special(self._added[token_id])
        if token_id in self._added:
            return pieces.from_bytes(self._added[token_id].encode())
        entry = self._tokenizer.id_to_token(token_id)
        return (
            pieces.unknown(token_id) if entry is None else pieces.from_bytes(self._to_bytes(entry))
        )


class _TransformersCodec:
    """Any tokenizer that transformers can load from the checkpoint's folder."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._decode: Callable[..., str] = tokenizer.decode

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def piece(self, token_id: int) -> Piece:
        if token_id >= len(self._tokenizer):
            return pieces.unknown(token_id)
        text = self._decode([token_id])
        if token_id in self._special:
            return pieces.special(text)
        return Piece(text, None if "\ufffd" in text else text.encode())


def _transformers_codec(model_dir: Path) -> Codec | str:
    reason = f"{model_dir} has no tokenizer.json"
    others = ("tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
    if not any((model_dir / name).is_file() for name in others):
        return reason
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return f"{reason}, and transformers, which could read the other files, is not installed"
    try:
        return _TransformersCodec(
            AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        )
    except Exception as error:  # whatever the tokenizer's own code raises
        return f"{reason}, and transformers cannot read the other files: {error}"


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file}: not an object")
    return config
