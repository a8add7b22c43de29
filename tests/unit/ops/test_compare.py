"""A comparison of two engines: which prompts are sent, how answers are read, and what is said of their differences."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.events.memory import MemoryLog
from headwater.events.ports import Entry
from headwater.ops.config.setting import ConfigError
from headwater.ops.operator.compare import (
    AnswerToken,
    EdgeClient,
    GreedyAnswer,
    LogprobGap,
    PromptRequest,
    _read,
    as_text,
    compare,
    find_divergence,
    read_prompts,
    recorded_prompts,
    request_body,
    summarize,
    tokens_of,
)
from headwater.schemas.encoding import SCHEMA_VERSION, Batch, seal
from headwater.schemas.events import RequestAccepted
from headwater.schemas.subjects import request_subject
from tests.support.worlds.clock import ManualClock


def answer(
    engine: str, *ids: int, error: str = "", first_s: float = 0.01, total_s: float = 0.05
) -> GreedyAnswer:
    """An answer of these tokens, without log probabilities."""
    return GreedyAnswer(engine, "w1", tuple(AnswerToken(one) for one in ids), first_s, total_s, error)


def accepted(number: int, body: Any, **fields: Any) -> RequestAccepted:
    """A request in the log."""
    given: dict[str, Any] = {"model": "m", "endpoint": "completions", "payload": "full", **fields}
    return RequestAccepted(
        f"r{number}",
        given["model"],
        given["endpoint"],
        3,
        5,
        False,
        payload=given["payload"],
        body=body if isinstance(body, bytes) else json.dumps(body).encode(),
    )


async def recorded(*events: RequestAccepted, limit: int = 10) -> list[PromptRequest]:
    """What a comparison takes of a request log with these events."""
    log = MemoryLog(ManualClock())
    batch: Batch[Any] = Batch(SCHEMA_VERSION, "e1", 1, 1, 0, events)
    await log.append(Entry(request_subject("ns", "e1"), seal(batch)))
    return await recorded_prompts(log, frozenset(("m", "alias")), limit)


async def test_the_newest_different_prompts_of_the_model_are_taken() -> None:
    """Under any of its names; not those that are no single generation, or whose payload is not there."""
    prompts = await recorded(
        accepted(1, {"prompt": "old"}),
        accepted(2, {"prompt": "a"}),
        accepted(3, {"messages": []}, endpoint="chat", model="alias"),
        accepted(4, {"prompt": "of another"}, model="other"),
        accepted(5, b"digest", payload="hashed"),
        accepted(6, {"prompt": ["a", "b"]}),
        accepted(7, {"input": "x"}, endpoint="embeddings"),
        accepted(8, b"no json"),
        accepted(9, {"prompt": [1, 2]}),
        accepted(10, {"prompt": "a"}),
        limit=3,
    )
    assert [(one.name, one.path) for one in prompts] == [
        ("r3", "/v1/chat/completions"),
        ("r9", "/v1/completions"),
        ("r10", "/v1/completions"),
    ]


async def test_a_log_without_payloads_says_how_to_record_them() -> None:
    """Instead of comparing nothing."""
    with pytest.raises(ConfigError, match=r"1 requests without their payload.*--record-payloads full"):
        await recorded(accepted(1, b"", payload="off"))


def test_prompts_are_read_from_a_file(tmp_path: Path) -> None:
    """Strings, completions and chats; blank lines are none."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '"one"\n\n{"prompt": [1, 2], "max_tokens": 3}\n{"messages": [{"role": "user"}]}\n"four"\n'
    )
    prompts = read_prompts(file, 3)
    assert [one.fields.get("prompt") for one in prompts] == ["one", [1, 2], None]
    assert [one.path for one in prompts] == ["/v1/completions"] * 2 + ["/v1/chat/completions"]
    assert prompts[0].name == "line 1"


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "empty"),
        ("{", "line 1"),
        ("5", "line 1: write"),
        ('{"prompt": []}', "write"),
        ('"a"\n{"x": 1}', "line 2"),
    ],
)
def test_a_file_that_has_no_prompts_is_refused(tmp_path: Path, text: str, mistake: str) -> None:
    """By file and line."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=mistake) as raised:
        read_prompts(file, 9)
    assert str(file) in str(raised.value)


def test_a_request_is_sent_greedily_and_with_what_makes_its_tokens_visible() -> None:
    """What the client wanted of sampling, streaming and several answers is replaced."""
    fields = {
        "messages": [],
        "temperature": 0.7,
        "top_p": 0.5,
        "n": 4,
        "seed": 3,
        "model": "old",
        "tools": ["t"],
    }
    body = request_body(
        PromptRequest("r", "/v1/chat/completions", {**fields, "max_completion_tokens": 9}), "m", 64, 5
    )
    assert body == {
        "messages": [],
        "tools": ["t"],
        "logprobs": True,
        "top_logprobs": 5,
        "model": "m",
        "max_tokens": 9,
        "temperature": 0,
        "n": 1,
        "stream": True,
        "return_token_ids": True,
    }
    completion = request_body(
        PromptRequest("r", "/v1/completions", {"prompt": "a", "max_tokens": 900}), "m", 64, 0
    )
    assert completion["max_tokens"] == 64
    assert "logprobs" not in completion
    assert request_body(PromptRequest("r", "/v1/completions", {"prompt": "a"}), "m", 64, 2)["logprobs"] == 2


def test_tokens_are_read_from_both_apis() -> None:
    """With the log probabilities by text; without them, ids alone."""
    chat = {
        "token_ids": [7],
        "logprobs": {
            "content": [{"token": "a", "logprob": -0.1, "top_logprobs": [{"token": "b", "logprob": -2.0}]}]
        },
    }
    assert tokens_of(chat) == [AnswerToken(7, "a", -0.1, {"b": -2.0})]
    completion = {
        "token_ids": [7, 8],
        "logprobs": {
            "tokens": ["a", "c"],
            "token_logprobs": [-0.1, -0.2],
            "top_logprobs": [{"b": -2.0}, None],
        },
    }
    assert tokens_of(completion) == [AnswerToken(7, "a", -0.1, {"b": -2.0}), AnswerToken(8, "c", -0.2, {})]
    assert tokens_of({"token_ids": [7, 8]}) == [AnswerToken(7), AnswerToken(8)]
    assert tokens_of({"text": ""}) == []


@pytest.mark.parametrize(
    ("lines", "ids", "error"),
    [
        (
            [
                {"choices": [{"token_ids": [1]}]},
                {"choices": [{"token_ids": [2, 3]}]},
                {"choices": []},
                b"[DONE]",
            ],
            [1, 2, 3],
            "",
        ),
        ([{"choices": [{"token_ids": [1]}]}, {"error": {"message": "it broke"}}], [1], "it broke"),
        ([{"choices": [{"token_ids": [1]}]}], [1], "the stream ended early"),
    ],
)
def test_a_stream_is_an_answer(lines: list[Any], ids: list[int], error: str) -> None:
    """With its error, if it has one: half an answer is none."""
    raw = [b"data: " + (one if isinstance(one, bytes) else msgspec.json.encode(one)) + b"\n" for one in lines]
    found = _read("vllm", "w1", iter([b": ping\n", b"\n", *raw]), 0.0)
    assert ([token.id for token in found.tokens], found.error) == (ids, error)
    assert 0 < found.first_s <= found.total_s


def test_the_first_differing_token_is_found_with_the_gap_on_both_sides() -> None:
    """How much likelier an engine's own token was to it; at least so much where it does not list the other."""
    ours = [
        AnswerToken(1, "a", -0.5, {"a": -0.5}),
        AnswerToken(2, "b", -0.7, {"b": -0.7, "c": -0.7001}),
        AnswerToken(9, "z", -1.0, {}),
    ]
    theirs = [AnswerToken(1, "a", -0.25, {"a": -0.25}), AnswerToken(3, "c", -1.6, {"c": -1.6, "d": -4.0})]
    found = find_divergence(ours, theirs)
    assert (found.position, found.equal_tokens, found.tokens) == (1, 1, ("b", "c"))
    assert found.logprob_difference == 0.25, "of equal tokens only"
    mine, other = found.gaps
    assert isinstance(mine, LogprobGap)
    assert isinstance(other, LogprobGap)
    assert [mine.value, other.value] == pytest.approx([0.0001, 2.4])
    assert [mine.at_least, other.at_least] == [False, True]


def test_equal_answers_and_answers_of_which_one_goes_on() -> None:
    """An end is a difference, without a gap."""
    same = find_divergence([AnswerToken(1), AnswerToken(2)], [AnswerToken(1), AnswerToken(2)])
    assert (same.position, same.equal_tokens, same.logprob_difference) == (None, 2, None)
    shorter = find_divergence([AnswerToken(1)], [AnswerToken(1), AnswerToken(2)])
    assert (shorter.position, shorter.tokens, shorter.gaps) == (1, (None, "#2"), (None, None))
    assert find_divergence([], []).position is None


def test_latency_is_of_the_requests_that_succeeded() -> None:
    """By nearest rank, in milliseconds."""
    answers = [answer("vllm", 1, first_s=n / 1_000, total_s=n / 100) for n in range(1, 201)]
    found = summarize("vllm", [*answers, answer("vllm", error="no", total_s=9.0)])
    assert (found.requests, found.failed, found.tokens) == (201, 1, 200)
    assert found.first_token_ms is not None
    assert found.total_ms is not None
    assert (found.first_token_ms.p50, found.first_token_ms.p99) == (100.0, 198.0)
    assert (found.total_ms.p50, found.total_ms.p99) == (1_000.0, 1_980.0)
    assert summarize("vllm", [answer("vllm", error="no")]).total_ms is None


def test_the_report_has_shares_times_differences_and_errors() -> None:
    """A prompt that an engine failed on counts as neither equal nor different."""
    pairs = [
        (answer("vllm", 1, 2), answer("sglang", 1, 2)),
        (answer("vllm", 1, 2), answer("sglang", 1, 3)),
        (answer("vllm", 1), answer("sglang", error="status 503: full")),
    ]
    found = compare("m", ["p1", "p2", "p3"], pairs)
    assert (found.compared, found.equal, found.equal_share) == (2, 1, 0.5)
    document = json.loads(msgspec.json.encode(found))
    assert document["equal_share"] == 0.5
    assert document["prompts"][1]["divergence"]["position"] == 1
    assert [one["failed"] for one in document["engines"]] == [0, 1]
    text = as_text(found)
    assert "2 of 3 prompts answered by both engines, 1 with equal tokens (50%)" in text
    line = next(line for line in text.splitlines() if line.startswith("p2"))
    assert line.split() == ["p2", "1", "'#2'", "'#3'", "-", "-"]
    assert "p3: sglang: status 503: full" in text
    assert "p1" not in text
    nothing = compare("m", ["p1"], [pairs[2]])
    assert nothing.equal_share is None
    assert "0 of 1 prompts" in as_text(nothing)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match="--url"):
        EdgeClient(url)


def test_an_edge_that_is_not_there_is_an_error_of_the_answer() -> None:
    """The comparison goes on and reports it."""
    found = EdgeClient("http://127.0.0.1:9").ask("vllm", "/v1/completions", {})
    assert found.error
    assert found.tokens == ()
