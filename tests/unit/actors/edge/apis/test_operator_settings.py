"""What an operator has set, from the settings of an edge to its prompts and answers."""

from typing import Any

import pytest

from headwater.engines.model_files import byte_tokenizer
from headwater.schemas.hashing import unpack_tokens
from tests.support.worlds.edge import EdgeWorld

CHAT = "/v1/chat/completions"


def chat(text: str, model: str = "m") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


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
    with EdgeWorld(reasoning_field=field) as edge:
        edge.serve("thinks", reasoning_parser="think")
        edge.says("<think>hmm</think>yes")
        message = edge.ask(CHAT, chat("hi", "thinks")).document["choices"][0]["message"]
        assert {name: message[name] for name in message if name.startswith("reasoning")} == dict.fromkeys(
            names, "hmm"
        )
