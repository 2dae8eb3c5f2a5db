"""Chat templates: messages -> the text that the model was trained on.

Templates come with checkpoints and are untrusted code, so they run in a sandbox, with the globals
that Hugging Face templates are written for.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2

from engine.api.chat_sandbox import Sandbox, rendered
from engine.api.types import RequestError
from engine.echo import plain
from engine.files import MIB, is_file, read_file

_MOST_BYTES = 4 * MIB


class ChatTemplate:
    """A compiled template with the special tokens that it may mention."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises jinja2.TemplateError, and whatever Python makes of code that it cannot compile:
        RecursionError, SyntaxError.
        """
        environment = Sandbox()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        options: dict[str, Any] | None = None,
    ) -> str:
        """The text of the conversation. Raises RequestError when the template refuses it."""
        names = {**self._special_tokens, **(options or {})}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return rendered(self._template, names)
        except Exception as error:  # the template is foreign code; any failure is this request's
            raise RequestError(
                f"the chat template refused the messages: {plain(str(error), 200)}",
                param="messages",
                code="chat_template",
            ) from None


def load_chat_template(model_dir: Path, config: dict[str, Any]) -> ChatTemplate | str:
    """The checkpoint's template, or the reason why there is none to use.

    config: what tokenizer_config.json holds. A chat_template.jinja file goes first; of several
    named templates the one called `default` is used.
    """
    file = model_dir / "chat_template.jinja"
    source: Any = config.get("chat_template")
    if is_file(file):
        try:
            source = read_file(file, _MOST_BYTES).decode()
        except OSError as error:
            return f"{file} cannot be read: {error.strerror}"
        except UnicodeDecodeError as error:
            return f"{file} is not UTF-8 (byte {error.start})"
    elif isinstance(source, list):
        named = [entry for entry in source if isinstance(entry, dict)]
        texts = [entry.get("template") for entry in named if entry.get("name") == "default"]
        source = texts[-1] if texts else None
    if not isinstance(source, str):
        return (
            "this checkpoint has no chat template (neither chat_template.jinja nor chat_template "
            "in tokenizer_config.json); use prompt or prompt_token_ids"
        )
    try:
        return ChatTemplate(source, special_tokens(config))
    except Exception as error:  # Python's compiler, too, has limits that a template can pass
        return f"the checkpoint's chat template cannot be read: {plain(str(error), 200)}"


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on, in their old (text) or new (object) shape."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
