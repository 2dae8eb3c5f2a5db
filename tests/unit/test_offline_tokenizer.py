"""Against transformers on the same files, and on small tokenizers of each kind of vocabulary."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engine.api import chat_sandbox
from engine.api.chat_template import ChatTemplate
from engine.api.pieces import Piece
from engine.api.tokenizer import Tokenizer as Loaded
from engine.api.tokenizer import load_tokenizer
from engine.api.types import RequestError
from engine.errors import UsageError
from helpers.offline import ByteCodec

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MESSAGES = [{"role": "system", "content": "be <b> \u2028"}, {"role": "user", "content": " hé 語"}]
TEMPLATE = """
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
    {% generation %}{{ '<|' + m.role + '|>' }}{{ m.content | tojson }}{{ eos_token }}
    {% endgeneration %}
    {%- if loop.index > 5 %}{% break %}{% endif %}
{% endfor %}
{{ bos_token }}{{ strftime_now('%Y') }}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""


def byte_level(folder: Path, **config: Any) -> Path:
    """A byte-level tokenizer without merges, with <s> and </s>; bos written by its processor."""
    vocabulary = {character: index for index, character in enumerate(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    bos = {"__type": "AddedToken", "content": "<s>", "special": True}
    return save(tokenizer, folder, {"bos_token": bos, "eos_token": "</s>"} | config)


def save(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_texts_and_chats_are_tokenised_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = byte_level(tmp_path, chat_template=TEMPLATE)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in ("hello", " hé 語\u2028", "a</s>b<tool>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(
            MESSAGES, add_generation_prompt=prompt, tokenize=True, return_dict=False
        )
        assert ours.encode_chat(MESSAGES, add_generation_prompt=prompt) == expected
    assert expected.count(ours.encode("")[0]) == 1  # the template's bos and no other


def test_a_template_can_refuse_a_message(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path, chat_template=TEMPLATE))
    with pytest.raises(RequestError, match="no tools here"):
        tokenizer.encode_chat([{"role": "tool", "content": "x"}])


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    def text(**options: Any) -> bytes:
        tokenizer = load_tokenizer(tmp_path)
        ids = tokenizer.encode_chat(MESSAGES, options=options)
        return b"".join(tokenizer.piece(token).data or b"" for token in ids)

    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ x }}"}]
    byte_level(tmp_path, chat_template=named)
    assert text(x=5) == b"D5"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert text() == b"F"


def test_checkpoints_without_a_template(tmp_path: Path) -> None:
    for template, words in ((None, "no chat template"), ("{% if %}", "cannot be read")):
        tokenizer = load_tokenizer(byte_level(tmp_path, chat_template=template))
        with pytest.raises(RequestError, match=words):
            tokenizer.encode_chat(MESSAGES)


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = load_tokenizer(byte_level(tmp_path, chat_template=template))
    with pytest.raises(RequestError, match="unsafe"):
        tokenizer.encode_chat(MESSAGES)


def test_pieces_of_a_byte_level_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path))
    pieces = [tokenizer.piece(token) for token in tokenizer.encode(" 語</s><tool>")]
    assert [piece.data for piece in pieces] == [
        b"<s>", b" ", b"\xe8", b"\xaa", b"\x9e", b"</s>", b"<tool>",
    ]  # fmt: skip
    assert [piece.special for piece in pieces] == [True, *[False] * 4, True, False]
    assert pieces[2].text == "\ufffd"
    assert [piece.key for piece in pieces[2:4]] == ["bytes:\\xe8", "bytes:\\xaa"]
    beyond = tokenizer.piece(5000)
    assert (beyond.text, beyond.data, beyond.known) == ("token_id:5000", None, False)


def test_pieces_of_a_sentence_piece_vocabulary(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<0x0A>": 1, "<0xE8>": 2, "\u2581a": 3, "b": 4, "<0xZZ>": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    loaded = load_tokenizer(save(tokenizer, tmp_path, {}))
    data = [loaded.piece(token).data for token in range(1, 6)]
    assert data == [b"\n", b"\xe8", b" a", b"b", b"<0xZZ>"]


def test_a_bos_that_only_the_config_asks_for(tmp_path: Path) -> None:
    folder = byte_level(tmp_path, add_bos_token=True)
    once = load_tokenizer(folder).encode("a")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.enable_truncation(1)
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(folder)
    assert loaded.encode("a") == once
    assert len(once) == 2
    assert len(loaded.encode("abc", add_special_tokens=False)) == 3  # no truncation either


def test_broken_files_are_named(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(UsageError, match="tokenizer_config"):
        load_tokenizer(tmp_path)


def test_without_any_tokenizer_file(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        tokenizer.encode("a")
    assert not tokenizer.piece(3).known


def test_a_tokenizer_that_only_transformers_reads(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    (tmp_path / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(BYTES)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    expected = GPT2Tokenizer.from_pretrained(str(tmp_path)).encode("hello")
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("hello") == expected
    assert [loaded.piece(token).text for token in expected] == list("hello")


def test_a_text_that_the_tokenizer_fails_on_is_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = load_tokenizer(save(words, tmp_path, {}))
    assert tokenizer.encode("a b") == [0, 1]
    with pytest.raises(RequestError, match=r"cannot take this text.*UNK") as caught:
        tokenizer.encode("a c")
    assert (caught.value.status, caught.value.code) == (400, "tokenizer_failed")


class Panic(BaseException):
    """As pyo3's PanicException is."""


@pytest.mark.parametrize("failure", [Panic("index out of bounds"), TypeError("x"), MemoryError()])
def test_whatever_a_tokenizer_raises_is_that_request_s(failure: BaseException) -> None:
    class Failing(ByteCodec):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            raise failure

        def piece(self, token_id: int) -> Piece:
            raise ValueError(token_id)

    tokenizer = Loaded(Failing(), ChatTemplate("x", {}))
    with pytest.raises(RequestError) as caught:
        tokenizer.encode("a")
    assert (caught.value.code, caught.value.param) == ("tokenizer_failed", "prompt")
    with pytest.raises(RequestError) as caught:
        tokenizer.encode_chat([])
    assert caught.value.param == "messages"
    assert not tokenizer.piece(5).known


def test_an_interrupt_is_no_failure_of_the_tokenizer() -> None:
    class Interrupted(ByteCodec):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Loaded(Interrupted(), "").encode("a")


def test_a_template_that_writes_half_a_character_is_refused(tmp_path: Path) -> None:
    folder = byte_level(tmp_path, chat_template="{{ '\\ud800' }}")
    with pytest.raises(RequestError, match="half of a UTF-16 pair"):
        load_tokenizer(folder).encode_chat(MESSAGES)


class CountingCodec(ByteCodec):
    """Remembers the longest text that it was given. A token for each word; long ones are unknown
    words, of one token, unless they are cut.
    """

    def __init__(self) -> None:
        self.longest = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.longest = max(self.longest, len(text))
        return [7] * len(text.split())


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_that_cannot_fit_is_refused_by_its_beginning(chat: bool) -> None:
    codec = CountingCodec()
    tokenizer = Loaded(codec, ChatTemplate("{{ messages[0].content }}", {}))

    def encode(text: str) -> list[int]:
        if chat:
            return tokenizer.encode_chat([{"role": "user", "content": text}], most=1000)
        return tokenizer.encode(text, most=1000)

    with pytest.raises(RequestError, match="max_model_len, which is 1000") as caught:
        encode("word " * 10**6)
    assert caught.value.code == "context_length_exceeded"
    assert codec.longest < 100_000
    assert len(encode("word " * 1000)) == 1000
    # As long, but of few tokens: it may fit, so it is encoded whole.
    assert len(encode("x" * 5 * 10**6)) == 1
    assert codec.longest == 5 * 10**6


def test_the_demo_s_tokenizer_refuses_megabytes_at_once(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path))
    begun = time.thread_time()
    with pytest.raises(RequestError, match="max_model_len"):
        tokenizer.encode("some words " * 4_000_000, most=1000)
    assert time.thread_time() - begun < 2


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (["a"], "no chat template"),
        ([{"name": [], "template": "x"}, {"name": "default"}], "no chat template"),
        ({"default": "x"}, "no chat template"),
        ("{{ " + "(" * 10_000 + ")" * 10_000 + " }}", "cannot be read"),
        ("{% if x %}" * 1000 + "{% endif %}" * 1000, "cannot be read"),
        ("{% for x in y %}" * 100 + "{% endfor %}" * 100, "cannot be read"),
    ],
)
def test_templates_of_the_wrong_shape(tmp_path: Path, template: Any, words: str) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path, chat_template=template))
    with pytest.raises(RequestError, match=words):
        tokenizer.encode_chat(MESSAGES)
    assert tokenizer.encode("a")


def test_a_template_file_that_cannot_be_read(tmp_path: Path) -> None:
    byte_level(tmp_path, chat_template="x")
    file = tmp_path / "chat_template.jinja"
    file.write_bytes(b"ab\xff")
    with pytest.raises(RequestError, match=r"not UTF-8 \(byte 2"):
        load_tokenizer(tmp_path).encode_chat(MESSAGES)
    file.write_bytes(b"x" * (5 << 20))
    with pytest.raises(RequestError, match="larger than"):
        load_tokenizer(tmp_path).encode_chat(MESSAGES)


def test_configs_that_are_nested_too_deep_or_panic(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"a":' * 100_000)
    with pytest.raises(UsageError, match=r"tokenizer_config.*nested too deep"):
        load_tokenizer(tmp_path)
    byte_level(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"a":' * 100_000)
    with pytest.raises(UsageError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 3 }}"
        "{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 10**10 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 10 ** 10 ** 10 ** 10 }}",
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    ],
)
def test_a_template_that_would_not_end_is_stopped(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_sandbox, "_MOST_S", 0.2)
    begun = time.thread_time()
    with pytest.raises(RequestError, match="refused the messages") as caught:
        ChatTemplate(template, {}).render(MESSAGES)
    assert time.thread_time() - begun < 2
    assert caught.value.code == "chat_template"


def test_a_template_that_writes_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "_MOST_CHARACTERS", 10**6)
    with pytest.raises(RequestError, match="more than 1000000 characters"):
        ChatTemplate("{% for i in range(2000) %}{{ 'x' * 1000 }}{% endfor %}", {}).render([])


def test_what_templates_do_with_loops_still_works() -> None:
    template = (
        "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}"
        "{{ '.' if loop.last else ',' }}{% else %}none{% endfor %}"
        "{% for i in range(3) %}{{ '-' * i }}{{ 2 ** i * 3 }}{% endfor %}"
        "{% for i in [] %}{% else %}empty{% endfor %}"
        "{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}"
    )
    text = ChatTemplate(template, {}).render([*MESSAGES, *MESSAGES])
    assert text == "1/2,2/2.3-6--12emptyx1"
