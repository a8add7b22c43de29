"""Generation's events as OpenAI's responses: golden transcripts, and the official client's types as the reader of them.

After a change that is meant: `python -m tests.unit.actors.edge.apis.chat.test_golden` writes the transcripts again.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headwater.actors.edge.apis.chat_encoder import ChatEncoder, CompletionEncoder, ShownParts
from headwater.actors.edge.parsing.grammar import OutputEvent
from headwater.actors.edge.prompt.request import ChoiceEnd, PromptDetail, TokenDetail
from headwater.actors.edge.tokenizer import Tokenizer
from headwater.actors.http.errors import bad_request
from headwater.engines.model_files import byte_tokenizer
from headwater.schemas.inference import TokenLogprob
from tests.support.data.generation_events import AGENT, START, TEXT, result, stream
from tests.support.data.tools import events_of, joined_choices
from tests.support.marks import OFFICIAL_CLIENT

GOLDEN = Path(__file__).parent / "golden"

TOKENIZER = Tokenizer(byte_tokenizer().to_str().encode())
USAGE = ShownParts(usage=True)
DETAILED = ShownParts(logprobs=True, prompt_logprobs=True, token_ids=True, echo=True)
PROMPT = PromptDetail("hi", (71, 72), (None, TokenLogprob(-1.5, ((9, -0.5), (72, -1.5)))))
DETAIL = TokenDetail((64, 65), (TokenLogprob(-0.1, ((64, -0.1),)), TokenLogprob(-9.0, ((1, -0.2),))))

CASES: dict[str, tuple[Callable[[], ChatEncoder | CompletionEncoder], tuple[OutputEvent, ...], ChoiceEnd]] = {
    "chat_agent": (lambda: ChatEncoder(TOKENIZER, USAGE), AGENT, ChoiceEnd("tool_calls")),
    "chat_agent_plain": (
        lambda: ChatEncoder(TOKENIZER, ShownParts(reasoning=())),
        AGENT,
        ChoiceEnd("tool_calls"),
    ),
    "chat_text": (lambda: ChatEncoder(TOKENIZER, ShownParts()), TEXT, ChoiceEnd("stop", "END")),
    "chat_length": (lambda: ChatEncoder(TOKENIZER, USAGE), TEXT[:1], ChoiceEnd("length")),
    "text": (lambda: CompletionEncoder(TOKENIZER, USAGE), TEXT, ChoiceEnd("stop", "", 7)),
}


def detailed(encoder: ChatEncoder | CompletionEncoder) -> bytes:
    """A stream with everything that can be seen of tokens."""
    sent = [encoder.start(START), encoder.start_choice(0, PROMPT)]
    sent += [encoder.text(0, "ab", DETAIL), encoder.end_choice(0, ChoiceEnd("stop"))]
    return b"".join([*sent, encoder.end(result(TEXT, ChoiceEnd("stop")))])


def failed(encoder: ChatEncoder | CompletionEncoder) -> bytes:
    error = bad_request("Worker w1 failed.", param="prompt", code="worker_failed")
    return encoder.start(START) + encoder.start_choice(0, None) + encoder.fail(error)


def transcripts() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, (make, events, end) in CASES.items():
        found[f"{name}.stream.txt"] = stream(make(), events, end).decode()
        body = make().encode_result(result(events, end))
        found[f"{name}.json"] = msgspec.json.format(body).decode() + "\n"
    for name, encoder in (("chat", ChatEncoder), ("text", CompletionEncoder)):
        found[f"{name}_detailed.stream.txt"] = detailed(encoder(TOKENIZER, DETAILED)).decode()
        found[f"{name}_failed.stream.txt"] = failed(encoder(TOKENIZER, USAGE)).decode()
    return found


@pytest.mark.parametrize("name", transcripts())
def test_responses_are_the_golden_transcripts(name: str) -> None:
    assert transcripts()[name] == (GOLDEN / name).read_text()


def test_no_transcript_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(transcripts())


@OFFICIAL_CLIENT
@pytest.mark.parametrize("name", CASES)
def test_the_official_client_reads_them_strictly(name: str) -> None:
    """Chunks and whole answers are valid for its types, and a stream adds up to the whole answer."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    make, events, end = CASES[name]
    chunks = events_of(stream(make(), events, end))
    body = make().encode_result(result(events, end))
    if name == "text":
        for chunk in chunks:
            Completion.model_validate({**chunk, "choices": [_with_reason(one) for one in chunk["choices"]]})
        Completion.model_validate_json(body)
        return
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    ChatCompletion.model_validate_json(body)
    whole = msgspec.json.decode(body)["choices"][0]
    added = joined_choices(chunks)[0]
    message = {key: value for key, value in whole["message"].items() if value is not None}
    assert {"content": "", **message} == added["message"]
    assert whole["finish_reason"] == added["finish_reason"]


def _with_reason(choice: dict[str, object]) -> dict[str, object]:
    # The client's type of a whole choice serves as that of a chunk too, which has no reason yet.
    return {**choice, "finish_reason": choice["finish_reason"] or "stop"}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file, text in transcripts().items():
        (GOLDEN / file).write_text(text)
