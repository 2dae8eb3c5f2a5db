"""Against transformers on the same files, and on small tokenizers of each kind of vocabulary."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engine.api.tokenizer import load_tokenizer
from engine.api.types import RequestError
from engine.errors import UsageError

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
