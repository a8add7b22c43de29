"""Parameters of chat completions and completions through the whole edge: what the engine gets, what the client gets."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken

from headwater.actors.edge.settings import ClientLimits
from headwater.engines.model_files import byte_model_files, byte_tokenizer
from headwater.schemas.hashing import unpack_tokens
from headwater.schemas.tables import Capability
from tests.support.data.tools import events_of
from tests.support.worlds.edge import EVERYTHING, EdgeWorld

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PLAIN: frozenset[Capability] = frozenset({"generate"})
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeWorld]:
    """Beside the usual model one whose engine has nothing optional, and one that fills in the middle."""
    with EdgeWorld(frame_tokens=2) as world:
        world.serve("plain", capabilities=PLAIN)
        world.serve("thinks", reasoning_parser="think")
        made = byte_tokenizer()
        made.add_special_tokens([AddedToken(text, special=True) for text in FIM])
        world.serve("coder", byte_model_files("coder")._replace(tokenizer=made.to_str().encode()))
        yield world


@pytest.fixture(autouse=True)
def _answer(edge: EdgeWorld) -> None:
    edge.given.clear()
    edge.says("abcdef")


def chat(edge: EdgeWorld, **fields: Any) -> Any:
    """The response to a chat request."""
    return _answered(edge, CHAT, {"messages": [{"role": "user", "content": "hi"}], **fields})


def complete(edge: EdgeWorld, **fields: Any) -> Any:
    """The response to a completion request."""
    return _answered(edge, COMPLETIONS, {"prompt": "xyz", **fields})


def _answered(edge: EdgeWorld, path: str, fields: dict[str, Any]) -> Any:
    response = edge.ask(path, {"model": "m", **fields})
    assert response.status == 200, response.body
    return events_of(response.body) if fields.get("stream") else response.document


def refused(edge: EdgeWorld, path: str = CHAT, **fields: Any) -> Any:
    """The error object of a request that is refused with 400."""
    base = {"model": "m", "prompt": "xyz", "messages": [{"role": "user", "content": "hi"}]}
    response = edge.ask(path, {**base, **fields})
    assert response.status == 400, response.body
    return response.document["error"]


def prompt_of(edge: EdgeWorld) -> list[int]:
    """Token ids of the last prompt."""
    ids: list[int] = unpack_tokens(edge.given[-1].tokens).tolist()
    return ids


def ids(text: str) -> list[int]:
    """Token ids of a text."""
    return list(byte_tokenizer().encode(text).ids)


@pytest.mark.parametrize("given", ["xyz", ids("xyz")], ids=["text", "token ids"])
def test_echo_repeats_the_prompt(edge: EdgeWorld, given: Any) -> None:
    """Whole and streamed, with log probabilities of both parts; the prompt's first token has none."""
    document = complete(edge, prompt=given, echo=True, logprobs=1)
    choice = document["choices"][0]
    assert choice["text"] == "xyzabcdef"
    assert choice["logprobs"]["tokens"] == list("xyzabcdef")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, *[-0.5] * 6]
    assert choice["logprobs"]["text_offset"] == list(range(9))
    assert edge.given[-1].sampling.prompt_logprobs == 1
    streamed = [
        event["choices"][0] for event in complete(edge, prompt=given, echo=True, logprobs=1, stream=True)
    ]
    assert "".join(one["text"] for one in streamed) == "xyzabcdef"
    joined = [token for one in streamed if one["logprobs"] for token in one["logprobs"]["tokens"]]
    offsets = [offset for one in streamed if one["logprobs"] for offset in one["logprobs"]["text_offset"]]
    assert (joined, offsets) == (list("xyzabcdef"), list(range(9)))


def test_no_tokens_score_a_prompt(edge: EdgeWorld) -> None:
    """With echo: the engine generates one token, which nobody sees or counts."""
    for stream in (False, True):
        found = complete(edge, echo=True, max_tokens=0, logprobs=0, stream=stream)
        texts = [one["text"] for event in (found if stream else [found]) for one in event["choices"]]
        assert "".join(texts) == "xyz"
    document = complete(edge, echo=True, max_tokens=0)
    assert (document["usage"]["completion_tokens"], document["choices"][0]["finish_reason"]) == (0, "length")


def test_best_of_returns_the_likeliest(edge: EdgeWorld) -> None:
    """As many as n, with their own indices; all are counted."""
    document = complete(edge, n=1, best_of=3, seed=4)
    assert [choice["index"] for choice in document["choices"]] == [0]
    assert document["choices"][0]["logprobs"] is None
    assert document["usage"]["completion_tokens"] == 18
    assert sorted(request.sampling.seed or 0 for request in edge.given) == [4, 5, 6]
    assert refused(edge, COMPLETIONS, model="plain", best_of=2)["param"] == "best_of"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["m", "thinks"])
def test_the_text_of_a_stop_token_is_left_out(edge: EdgeWorld, stream: bool, model: str) -> None:
    """As in vLLM: its id is among the token ids, it is counted, and `stop_reason` names it."""
    (last,) = ids("f")
    wanted: dict[str, Any] = {"stop_token_ids": [last, 5], "return_token_ids": True, "stream": stream}
    for include, text in ((False, "abcde"), (True, "abcdef")):
        found = chat(edge, model=model, **wanted, include_stop_str_in_output=include)
        choices = [event["choices"][0] for event in found if event["choices"]] if stream else found["choices"]
        told = [one.get("delta" if stream else "message", {}).get("content") or "" for one in choices]
        assert "".join(told) == text
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == last
        assert [token for one in choices for token in one.get("token_ids", ())] == ids("abcdef")
    assert "stop_reason" not in chat(edge, stop_token_ids=[5])["choices"][0]


def test_a_stop_string_before_a_stop_token_is_the_one_that_is_named(edge: EdgeWorld) -> None:
    """Both in one step: the text ends at the string."""
    choice = chat(edge, stop=["cd"], stop_token_ids=ids("f"))["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("ab", "cd")


def test_the_prompts_log_probabilities_have_vllms_shape(edge: EdgeWorld) -> None:
    """Per token an object by token id; with the token ids of prompt and answer where wanted."""
    document = chat(edge, prompt_logprobs=2, return_token_ids=True)
    prompt = prompt_of(edge)
    assert document["prompt_token_ids"] == prompt
    first, second, *_ = document["prompt_logprobs"]
    assert first is None
    decoded = byte_tokenizer().decode([prompt[1]])
    assert second == {str(prompt[1]): {"logprob": -1.0, "rank": 1, "decoded_token": decoded}}
    assert document["choices"][0]["token_ids"] == ids("abcdef")
    start, *rest = chat(edge, prompt_logprobs=0, return_token_ids=True, stream=True)
    assert start["choices"][0]["prompt_token_ids"] == prompt
    assert len(start["choices"][0]["prompt_logprobs"]) == len(prompt)
    sent = [token for event in rest for token in event["choices"][0].get("token_ids", ())]
    assert sent == ids("abcdef")


def test_the_operator_bounds_choices(edge: EdgeWorld) -> None:
    """Of each prompt, returned or not; the default is the bound of the field."""
    with EdgeWorld(client=ClientLimits(choices_max=2)) as bounded:
        assert len(chat(bounded, n=2)["choices"]) == 2
        for field in ("n", "best_of"):
            error = refused(bounded, COMPLETIONS, **{field: 3})
            assert (error["param"], error["message"]) == (
                "n",
                "At most 2 choices (n, best_of) of one prompt are generated here.",
            )
    assert len(chat(edge, n=3)["choices"]) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_name_tokens_by_id_where_that_is_wanted(edge: EdgeWorld, stream: bool) -> None:
    """In both endpoints; anything but a boolean is refused by name."""
    names = [f"token_id:{token}" for token in ids("abcdef")]
    wanted: dict[str, Any] = {"return_tokens_as_token_ids": True, "stream": stream}
    found = chat(edge, logprobs=True, **wanted)
    choices = [event["choices"][0] for event in found if event["choices"]] if stream else found["choices"]
    assert [
        entry["token"] for one in choices if one["logprobs"] for entry in one["logprobs"]["content"]
    ] == names
    found = complete(edge, logprobs=1, **wanted)
    choices = [event["choices"][0] for event in found if event["choices"]] if stream else found["choices"]
    assert [token for one in choices if one["logprobs"] for token in one["logprobs"]["tokens"]] == names
    error = refused(edge, COMPLETIONS, return_tokens_as_token_ids="yes")
    assert error["param"] == "return_tokens_as_token_ids"


def test_a_long_prompt_has_a_bound_of_log_probabilities(edge: EdgeWorld) -> None:
    """They travel in one message."""
    error = refused(edge, COMPLETIONS, prompt=[1] * 2_000, prompt_logprobs=20)
    assert error["param"] == "prompt_logprobs"


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids", (1, 2)),
        ({"bad_words": ["no"]}, "bad_words", ("no",)),
        ({"prompt_logprobs": 0}, "prompt_logprobs", 0),
    ],
)
def test_sampling_fields_reach_engines_that_have_them(
    edge: EdgeWorld, fields: dict[str, Any], name: str, value: Any
) -> None:
    """And are refused by name for others."""
    for path in (CHAT, COMPLETIONS):
        base = {"prompt": "x", "messages": [{"role": "user", "content": "hi"}]}
        _answered(edge, path, {**base, **fields})
        assert getattr(edge.given[-1].sampling, name) == value
    assert refused(edge, model="plain", **fields)["param"] == name
    if name == "allowed_token_ids":
        assert refused(edge, allowed_token_ids=[10**6])["param"] == name


def test_a_long_prompt_is_truncated_on_either_side(edge: EdgeWorld) -> None:
    """To a number of tokens, or so that the answer fits; on the left unless the request says otherwise."""
    complete(edge, prompt="abcdefgh", truncate_prompt_tokens=3)
    assert prompt_of(edge) == ids("fgh")
    complete(edge, prompt="abcdefgh", truncate_prompt_tokens=3, truncation_side="left")
    assert prompt_of(edge) == ids("fgh")
    complete(edge, prompt="abcdefgh", truncate_prompt_tokens=3, truncation_side="right")
    assert prompt_of(edge) == ids("abc")
    chat(edge, truncate_prompt_tokens=4)
    last = prompt_of(edge)
    chat(edge, truncate_prompt_tokens=4, truncation_side="right")
    assert len(prompt_of(edge)) == 4
    assert prompt_of(edge) != last
    error = refused(edge, truncate_prompt_tokens=4, truncation_side="middle")
    assert error["param"] == "truncation_side"
    assert error["message"].startswith("Invalid enum value: it must be one of left, right")
    complete(edge, prompt="a" * 9_000, truncate_prompt_tokens=-1, max_tokens=6)
    assert len(prompt_of(edge)) == 4_096 - 6
    chat(edge, truncate_prompt_tokens=4)
    assert len(prompt_of(edge)) == 4
    assert refused(edge, truncate_prompt_tokens=0)["param"] == "truncate_prompt_tokens"
    assert refused(edge, truncate_prompt_tokens=10**6)["param"] == "truncate_prompt_tokens"


def test_the_last_message_is_continued(edge: EdgeWorld) -> None:
    """The prompt ends in its text, with white space and control tokens that the template would change."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is "}]
    chat(edge, messages=messages, continue_final_message=True)
    assert edge.prompt().endswith("<|im_start|>assistant\nIt is ")
    assert refused(edge, continue_final_message=True)["param"] == "continue_final_message"


def test_the_middle_is_filled_in_where_the_model_can(edge: EdgeWorld) -> None:
    """With the tokens that its vocabulary has for it; spelled out in a text they are text."""
    complete(edge, model="coder", prompt="def f(<|fim_suffix|>", suffix="  return x")
    found = prompt_of(edge)
    marks = [found[0], found[-1]]
    assert marks == [262, 264]
    assert found.count(263) == 1
    assert refused(edge, COMPLETIONS, suffix="x")["param"] == "suffix"
    assert refused(edge, COMPLETIONS, model="coder", prompt=[1], suffix="x")["param"] == "suffix"


def test_the_stop_string_is_part_of_the_text_where_wanted(edge: EdgeWorld) -> None:
    """And is named, as vLLM does."""
    for kept, text in ((False, "ab"), (True, "abcd")):
        choice = complete(edge, stop="cd", include_stop_str_in_output=kept)["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "cd")


def test_special_tokens_are_shown_where_wanted(edge: EdgeWorld) -> None:
    """Except those that end the answer."""
    edge.says("a<|im_start|>b<|im_end|>")
    assert complete(edge)["choices"][0]["text"] == "ab"
    assert complete(edge, skip_special_tokens=False)["choices"][0]["text"] == "a<|im_start|>b"


def test_usage_is_in_every_chunk_where_wanted(edge: EdgeWorld) -> None:
    """Counting up; otherwise null in all but the last."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chat(edge, stream=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len(set(counts)) > 2
    plain = chat(edge, stream=True, stream_options={"include_usage": True})
    assert [event["usage"] is None for event in plain] == [True] * (len(plain) - 1) + [False]


def test_a_cache_key_is_a_session(edge: EdgeWorld) -> None:
    """Requests with the same one prefer the same worker; the key itself leaves the edge as a digest."""
    for key in ("secret key", "secret key", "other"):
        chat(edge, prompt_cache_key=key, user="u")
    one, same, other = [query.preferences.session for query in edge.queries[-3:]]
    assert one == same != other
    assert "secret" not in one


def test_a_prompt_counts_once_in_the_usage(edge: EdgeWorld) -> None:
    """With several choices its cached part never exceeds it; what was computed fills whole blocks."""
    usage = complete(edge, prompt="x" * 100, n=3)["usage"]
    assert usage["prompt_tokens"] == 100
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 96}


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}, "image_url"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}, "image_url"),
        ({"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}, "input_audio"),
        ({"type": "video_url", "video_url": {"url": "http://a.example/x"}}, "video_url"),
        ({"type": "file", "file": {"file_id": "f1"}}, "file.file_id"),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64,aGk="}}, "file.file_data"),
        ({"type": "file", "file": {"file_data": "data:text/plain,a"}}, "file.file_data"),
        ({"type": "file", "file": {"file_data": "aGk=", "filename": 1}}, "file.filename"),
        ({"type": "file", "file": {"filename": "a.txt"}}, "file.file_data"),
        ({"type": "file", "file": "aGk="}, "file"),
        ({"type": "image_url", "image_url": {"url": "ftp://a"}}, "image_url"),
        ({"type": "image_url", "image_url": {"url": "https://"}}, "image_url"),
        ({"type": "image_url", "image_url": {"url": "http://[::1"}}, "image_url"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, "image_url"),
        ({"type": "image_url", "image_url": {"url": "https://a", "detail": "best"}}, "image_url.detail"),
        ({"type": "image_url"}, "image_url"),
        ({"type": "input_audio", "input_audio": {"data": "aGk="}}, "input_audio.format"),
        ({"type": "hologram"}, "type"),
        ({"type": "text"}, "text"),
    ],
)
def test_media_are_checked_and_refused_by_name(edge: EdgeWorld, part: dict[str, Any], param: str) -> None:
    """The part is named, whether it is invalid or the model takes text only."""
    error = refused(edge, messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert error["param"] == f"messages[0].content[1].{param}"
    if "valid" not in json.dumps(part) and param == "video_url":
        assert "text only" in error["message"]


def test_everything_here_is_a_capability() -> None:
    """So that a change of the test's model does not empty these tests."""
    assert {"prompt_logprobs", "allowed_tokens", "bad_words", "kv_events"} <= EVERYTHING
