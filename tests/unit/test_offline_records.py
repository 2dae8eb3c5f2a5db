import json
import math
from typing import Any

import pytest

from engine.api.tokenizer import Tokenizer
from engine.api.types import Kind, Origin, Prompt, RequestError
from engine.control.messages import KvFile, PrefillResult, Sampling, TokenLogprob
from helpers.offline import EOS, FINGERPRINT, writer

ORIGIN = Origin(4, "idé\u2028", "batch_req_" + "ab" * 16)


def prompt(kind: Kind = "completion", **changes: Any) -> Prompt:
    given = {
        "origin": ORIGIN, "kind": kind, "token_ids": [65, 66, 67], "sampling": Sampling(),
        "max_tokens": 1, "logprobs": None, "prompt_logprobs": None, "model": None,
    }  # fmt: skip
    return Prompt(**(given | changes))


def record(prompt: Prompt, **result: Any) -> dict[str, Any]:
    line = writer().result(prompt, PrefillResult(0, **({"token_id": ord("x")} | result)))
    assert line.endswith(b"\n")
    assert line.isascii()
    assert len(line.decode().splitlines()) == 1
    decoded: dict[str, Any] = json.loads(line, parse_constant=pytest.fail)
    return decoded


def test_a_completion() -> None:
    result = record(prompt())
    assert result["id"] == ORIGIN.record
    assert result["custom_id"] == ORIGIN.custom_id
    assert result["error"] is None
    assert result["response"]["status_code"] == 200
    assert result["response"]["request_id"] == "req_" + "ab" * 16
    body = result["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    assert body["system_fingerprint"] == FINGERPRINT
    assert body["choices"] == [
        {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length", "token_ids": [120]}
    ]


def test_a_chat() -> None:
    body = record(prompt("chat", model="named"))["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "named")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "x", "refusal": None}
    assert "text" not in choice


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_no_token_is_chosen_with_a_limit_of_none(kind: Kind) -> None:
    body = record(prompt(kind, max_tokens=0, logprobs=2), token_id=EOS)["response"]["body"]
    (choice,) = body["choices"]
    assert choice.get("text", choice.get("message", {}).get("content")) == ""
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"] == []
    assert choice["logprobs"]["tokens" if kind == "completion" else "content"] == []
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}


def test_the_end_token_stops_and_is_no_text() -> None:
    (choice,) = record(prompt(), token_id=EOS)["response"]["body"]["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_the_prompt_as_token_ids_is_where_vllm_has_it() -> None:
    body = record(prompt(return_token_ids=True))["response"]["body"]
    assert body["choices"][0]["prompt_token_ids"] == [65, 66, 67]
    assert body["choices"][0]["token_ids"] == [120]
    assert "prompt_token_ids" not in body
    body = record(prompt("chat", return_token_ids=True))["response"]["body"]
    assert body["prompt_token_ids"] == [65, 66, 67]
    assert "prompt_token_ids" not in body["choices"][0]
    body = record(prompt("chat"))["response"]["body"]
    assert "prompt_token_ids" not in body


TOP = [
    TokenLogprob(0xE8, -3.0, 3),
    TokenLogprob(ord("a"), -0.5, 1),
    TokenLogprob(0xE9, -1.0, 2),
]


def test_logprobs_of_a_completion() -> None:
    result = record(prompt(logprobs=2), token_id=0xE8, top=TOP)
    (choice,) = result["response"]["body"]["choices"]
    assert choice["logprobs"] == {
        "tokens": ["bytes:\\xe8"],
        "token_logprobs": [-3.0],
        "top_logprobs": [{"a": -0.5, "bytes:\\xe9": -1.0, "bytes:\\xe8": -3.0}],
        "text_offset": [0],
    }


def test_logprobs_of_a_chat() -> None:
    result = record(prompt("chat", logprobs=1), token_id=0xE8, top=TOP)
    (choice,) = result["response"]["body"]["choices"]
    (content,) = choice["logprobs"]["content"]
    assert content == {
        "token": "\ufffd",
        "logprob": -3.0,
        "bytes": [0xE8],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
    }


def test_no_infinity_and_no_nan_in_json() -> None:
    top = [TokenLogprob(97, -math.inf, 9), TokenLogprob(98, math.nan, 1)]
    result = record(prompt(logprobs=1), top=top)
    logprobs = result["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert logprobs["top_logprobs"] == [{"b": -9999.0, "a": -9999.0}]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_prompt_logprobs(kind: Kind) -> None:
    entries = [None, [TokenLogprob(66, -2.0, 5), TokenLogprob(97, -0.1, 1)], [TOP[1]]]
    result = record(prompt(kind, prompt_logprobs=1), prompt_logprobs=entries)
    assert result["response"]["body"]["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "66": {"logprob": -2.0, "rank": 5, "decoded_token": "B"},
            "97": {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
        },
        {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}},
    ]


def test_without_a_tokenizer_the_ids_stand_for_the_text() -> None:
    bare = writer(Tokenizer("none", "none"))
    line = bare.result(prompt(logprobs=1), PrefillResult(0, 120, [TokenLogprob(120, -1.0, 1)] * 2))
    (choice,) = json.loads(line)["response"]["body"]["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", [120])
    assert choice["logprobs"]["tokens"] == ["token_id:120"]


def test_the_kv_file_is_named() -> None:
    body = record(prompt(), kv=KvFile("/k/a", 3, "ff", {}, "float32"))["response"]["body"]
    assert body["kv"] == {"path": "/k/a", "tokens": 3, "token_sha256": "ff"}


def test_a_line_that_cannot_be_done() -> None:
    failure = RequestError("top_k is odd", param="top_k", code="invalid_value")
    record = json.loads(writer().failure(ORIGIN, failure))
    assert record["response"]["status_code"] == 400
    assert record["response"]["body"]["error"] == {
        "message": "line 4: top_k is odd",
        "type": "invalid_request_error",
        "param": "top_k",
        "code": "invalid_value",
    }
    assert record["error"] == {
        "code": "invalid_value",
        "message": "line 4: top_k is odd",
        "line": 4,
    }


def test_a_prompt_that_the_engine_could_not_do() -> None:
    result = record(prompt(), error="no room")
    assert result["response"]["status_code"] == 500
    assert result["response"]["body"]["error"]["type"] == "server_error"
    assert result["error"]["message"] == "line 4: no room"
