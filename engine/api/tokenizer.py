"""Text -> token ids and back, by the checkpoint's own tokenizer.

`tokenizers` reads tokenizer.json. Checkpoints without one go through transformers where that is
installed; otherwise only prompts given as token ids can run, and `reason` says why.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from engine.api import pieces
from engine.api.chat_template import ChatTemplate, load_chat_template, special_tokens
from engine.api.document import has_surrogate
from engine.api.pieces import Piece
from engine.api.types import RequestError
from engine.echo import cut, plain
from engine.errors import UsageError
from engine.files import MOST_JSON_BYTES, is_file, parse_json, read_file

# How much of a text is tried first: several characters a token, as long texts have.
_TRIED_PER_TOKEN = 8
_LEAST_TRIED = 4096


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

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        most: int | None = None,
        param: str = "prompt",
    ) -> list[int]:
        """Raises RequestError (of `param`): no tokenizer, a text that it cannot take, or one that
        has far more than `most` tokens. A result may still have more than `most`.
        """
        codec = self._readable()
        if most is not None:
            _check_length(codec, text, most, param)
        return _encode(codec, text, add_special_tokens, param)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        options: dict[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """As `encode`. Raises RequestError also for a missing template, or messages that it
        refuses.
        """
        self._readable()
        if isinstance(self._template, str):
            raise RequestError(self._template, param="messages", code="no_chat_template")
        text = self._template.render(
            messages, add_generation_prompt=add_generation_prompt, options=options
        )
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False, most=most, param="messages")

    def piece(self, token_id: int) -> Piece:
        """The token by itself; a stand-in text where nothing is known of it."""
        known = self._pieces.get(token_id)
        if known is None:
            codec = self._codec
            known = pieces.unknown(token_id) if isinstance(codec, str) else _piece(codec, token_id)
            self._pieces[token_id] = known
        return known

    def _readable(self) -> Codec:
        if isinstance(self._codec, str):
            raise RequestError(
                f"{self._codec}; only prompt_token_ids can be used", code="no_tokenizer"
            )
        return self._codec


def _check_length(codec: Codec, text: str, most: int, param: str) -> None:
    """Raises RequestError for a text of far more than `most` tokens, at a cost that grows with
    `most` and not with the text: a long one is tried by its beginning, then by twice as much, and
    so on. Where the beginning is cut its last word may get other tokens than in the text, which the
    factor of two is for.
    """
    size = max(_TRIED_PER_TOKEN * most, _LEAST_TRIED)
    while size < len(text):
        try:
            tokens = len(_encode(codec, text[:size], False, param))
        except RequestError:  # perhaps for the half word at the end
            tokens = 0
        if tokens > 2 * most:
            raise RequestError(
                f"the prompt is far longer than max_model_len, which is {most} tokens",
                param=param,
                code="context_length_exceeded",
            )
        size *= 2


def _encode(codec: Codec, text: str, add_special_tokens: bool, param: str) -> list[int]:
    """Raises RequestError for whatever the tokenizer's code raises."""
    try:
        return codec.encode(text, add_special_tokens)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust code is no Exception
        reason = "it holds half of a UTF-16 pair" if has_surrogate(text) else cut(str(error), 200)
        raise RequestError(
            f"the tokenizer cannot take this text: {reason}", param=param, code="tokenizer_failed"
        ) from None


def _piece(codec: Codec, token_id: int) -> Piece:
    try:
        return codec.piece(token_id)
    except Exception:  # a token that its own library cannot decode
        return pieces.unknown(token_id)


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Raises UsageError when a tokenizer file is there but cannot be read."""
    config = _read_config(model_dir / "tokenizer_config.json")
    file = model_dir / "tokenizer.json"
    codec: Codec | str
    if is_file(file):
        try:
            codec = _FastCodec(file, config)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # `tokenizers` raises bare Exceptions, and panics
            raise UsageError(
                f"{file}: not a tokenizer: {plain(str(error), 200)}. Copy it from the model's "
                "repository again"
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
    if not any(is_file(model_dir / name) for name in others):
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
        return f"{reason}, and transformers cannot read the other files: {plain(str(error), 200)}"


def _read_config(file: Path) -> dict[str, Any]:
    if not is_file(file):
        return {}
    try:
        config = parse_json(read_file(file, MOST_JSON_BYTES))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{file}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file}: not an object")
    return config
