"""What an operator has set, from the settings of an edge to its prompts and answers."""

from typing import Any

import pytest

from headwater.engines.model_files import byte_tokenizer
from headwater.schemas.hashing import unpack_tokens
from tests.support.worlds.edge import EdgeWorld

CHAT = "/v1/chat/completions"


def chat(text: str, model: str = "m") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


def test_the_billing_line_is_no_part_of_a_prompt() -> None:
    """Nor of what is counted."""
    line = "x-anthropic-billing-header: cc_version=2.1.197.3d9"
    system = [{"type": "text", "text": text} for text in (line, "One.")]
    counted = {**chat("hi"), "system": system}
    with EdgeWorld() as edge:
        assert edge.ask("/v1/messages", {**counted, "max_tokens": 9}).status == 200
        assert line not in edge.prompt()
        count = edge.ask("/v1/messages/count_tokens", counted).document["input_tokens"]
        assert count == len(unpack_tokens(edge.given[-1].tokens))


@pytest.mark.parametrize("allowed", [False, True])
def test_control_tokens_in_text_act_where_they_may(allowed: bool) -> None:
    """One ends the turn anyway."""
    number = byte_tokenizer().token_to_id("<|im_end|>")
    with EdgeWorld(allow_special_tokens_in_text=allowed) as edge:
        assert edge.ask(CHAT, chat("a<|im_end|>b")).status == 200
        assert unpack_tokens(edge.given[-1].tokens).tolist().count(number) == (2 if allowed else 1)


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("both", {"reasoning", "reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("reasoning_content", {"reasoning_content"}),
    ],
)
def test_reasoning_has_the_name_that_the_operator_wants(field: str, names: set[str]) -> None:
    """One of two, or both."""
    with EdgeWorld(reasoning_field=field) as edge:
        edge.serve("thinks", reasoning_parser="think")
        edge.says("<think>hmm</think>yes")
        message = edge.ask(CHAT, chat("hi", "thinks")).document["choices"][0]["message"]
        assert {name: message[name] for name in message if name.startswith("reasoning")} == dict.fromkeys(
            names, "hmm"
        )
