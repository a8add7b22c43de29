"""What vLLM's parsers make of texts: a program of the environment with vLLM. It reads and writes JSON files.

python -m tests.parsers.vllm_reader CASES RESULTS
"""

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

MARKERS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_calls>", "</tool_calls>", "<|tool_call|>", "<function_call>",
    "<longcat_tool_call>", "</longcat_tool_call>", "<|python_tag|>", "<|action_start|>", "<|action_end|>", "<|plugin|>",
    "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>",
    "<|START_TEXT|>", "<|END_TEXT|>", "<|role_sep|>", "<|message_sep|>", "<|function_call|>", "<|tools_prefix|>", "<|tools_suffix|>",
    "<|inner_prefix|>", "<|inner_suffix|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<seed:tool_call>", "</seed:tool_call>",
    "<seed:think>", "</seed:think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>",
    "</minimax:tool_call>", "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>",
    "｜DSML｜", "<|open|>", "<|close|>", "<|sep|>", "<tool_sep>", "<ifm|tool_calls>", "</ifm|tool_calls>", "<ifm|tool_call>",
    "</ifm|tool_call>", "<ifm|think>", "</ifm|think>", "<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tool_response>", "<start_function_call>", "<end_function_call>",
    "<escape>", "<dots_function_call>", "</dots_function_call>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>",
    "<|call|>", "<|return|>", "<|eom|>", "<|eot|>",
    *(
        f"<|plamo:{name}:plamo|>"
        for name in (
            "begin_tool_requests", "end_tool_requests", "begin_tool_request", "end_tool_request", "begin_tool_name", "end_tool_name",
            "begin_tool_arguments", "end_tool_arguments", "constrain", "msg", "begin_think", "end_think",
        )
    ),
    "<|plamo:constrain|>", "<|plamo:msg|>", "<|plamo:tag|>",
)  # fmt: skip
"""Single tokens of the models' vocabularies. Every other character is one to four tokens here."""


@cache
def _split(tokens: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted((*MARKERS, *tokens), key=len, reverse=True))))


@cache
def tokenizer(tokens: tuple[str, ...] = ()) -> Any:
    """A tokenizer with a token for each byte, each marker, and each of the family's own `tokens`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(dict.fromkeys((*MARKERS, *tokens))))
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)


def deltas_of(text: str, sizes: list[int], tokens: tuple[str, ...] = ()) -> list[str]:
    """The text in pieces of these sizes, in turn; a marker is never cut, nor one of `tokens`, as no token is."""
    atoms: list[str] = []
    at = 0
    for found in _split(tokens).finditer(text):
        atoms += [*text[at : found.start()], found.group()]
        at = found.end()
    atoms += text[at:]
    pieces = []
    turn = place = 0
    while place < len(atoms):
        size = sizes[turn % len(sizes)]
        pieces.append("".join(atoms[place : place + size]))
        place += size
        turn += 1
    return pieces


def make(name: str, tools: list[dict[str, Any]], known: Any) -> tuple[Any, Any]:
    """A parser as vLLM's server makes it for a request, over a tokenizer, without one for reasoning, and the request.

    Behind a colon the name has the variant of the format that the request asks for.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    name, _, variant = name.partition(":")
    request = ChatCompletionRequest(
        model="m",
        messages=[{"role": "user", "content": "q"}],
        tools=tools,
        tool_choice="auto",
        chat_template_kwargs={"tool_call_format": variant} if variant else None,
    )
    made = ParserManager.get_parser(name, None, enable_auto_tools=True)
    return made(known, request.tools), request


def whole(name: str, case: dict[str, Any]) -> dict[str, Any]:
    known = tokenizer(tuple(case["tokens"]))
    parser, request = make(name, case["tools"], known)
    ids = known.encode(case["text"], add_special_tokens=False)
    _reasoning, content, calls = parser.parse(
        case["text"], request, enable_auto_tools=True, model_output_token_ids=ids
    )
    return {"text": content or "", "calls": [[call.name, call.arguments] for call in calls or ()]}


def streamed(name: str, case: dict[str, Any]) -> dict[str, Any]:
    tokens = tuple(case["tokens"])
    known = tokenizer(tokens)
    parser, request = make(name, case["tools"], known)
    text: list[str] = []
    calls: dict[int, list[str]] = {}
    pieces = deltas_of(case["text"], case["sizes"], tokens)
    for number, piece in enumerate(pieces, 1):
        ids = known.encode(piece, add_special_tokens=False)
        delta = parser.parse_delta(piece, ids, request, [0], finished=number == len(pieces))
        if delta is None:
            continue
        text.append(delta.content or "")
        for call in delta.tool_calls or ():
            begun = calls.setdefault(call.index, ["", ""])
            if call.function is not None:
                begun[0] += call.function.name or ""
                begun[1] += call.function.arguments or ""
    return {"text": "".join(text), "calls": [calls[index] for index in sorted(calls)]}


def main() -> None:
    """Read the cases, write the readings."""
    cases = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for case in cases:
        result = {}
        for way in (whole, streamed):
            try:
                result[way.__name__] = way(case["vllm"], case)
            except Exception as error:
                result[way.__name__] = {"error": f"{type(error).__name__}: {error}"[:200]}
        results.append(result)
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
