"""Formats that a model's own code makes, compared with the chat templates of the same models, word for word.

python -m tests.templates.coded --templates FOLDER [--tokenizers FOLDER] [--kimi FOLDER] [--show NAME] [TEMPLATE ...]

Needs vLLM, whose encoders these are. `--tokenizers` has gpt-oss's vocabulary, from which the file is written that Harmony's renderer reads;
`--kimi` has `encoding_k3.py` of Kimi K3's own repository, which no package has. Cohere's formats are in the package `cohere-melody`; without it
they are left out.
"""

import argparse
import difflib
import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest as MistralRequest
from mistral_common.tokens.tokenizers.base import SpecialTokens
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.cohere import _build_render_config
from vllm.renderers.kimi_k3 import _apply_k3_thinking_kwargs, _normalize_k3_tool_messages
from vllm.tokenizers.deepseek_v4 import get_deepseek_v4_tokenizer
from vllm.tokenizers.deepseek_v32 import get_deepseek_v32_tokenizer

from headwater.actors.edge.chat_template import ChatTemplate
from headwater.actors.edge.prompt.conversation import _call_id
from headwater.actors.edge.template_form import WHOLE
from tests.templates.conversations import Conversation
from tests.templates.judge import CONVERSATIONS, Render, judge, renders
from tests.templates.vllm_prompt import CONFIG, asked, small_tokenizer
from tests.tokens.vocabularies import write_o200k

DEEPSEEK: Final = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
MISTRAL: Final = {"bos_token": "<s>", "eos_token": "</s>"}
COHERE: Final = {"bos_token": "<BOS_TOKEN>"}
MISTRAL_DATA: Final = Path(mistral_common.__file__).parent / "data"
SHORT: Final = WHOLE._replace(ids_short=True)
"""Both have ids of the length that Mistral's formats demand."""

DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
WORD: Final = re.compile(r"\w+|\W")
INSTRUCTION: Final = re.compile(r"set platform_instruction_override -%}\n(.*?)\n?{%- endset", re.DOTALL)
"""What Cohere2MoE's template says unless a client says something else."""

SHOWN: Final = 100
"""Characters of a difference that are printed."""


class Pair(NamedTuple):
    """A template, and the code that makes the same format."""

    template: str
    special_tokens: dict[str, str]
    coded: Callable[[], Render]


def deepseek(wrap: Callable[[Any], Any], form: Any) -> Callable[[], Render]:
    """DeepSeek's encoder for V3.2 or V4, as vLLM calls it."""

    def made() -> Render:
        tokenizer = wrap(small_tokenizer(DEEPSEEK))

        def rendered(given: Conversation) -> str:
            request, messages, tools = asked(given, None)
            conversation, _, _ = parse_chat_messages(messages, CONFIG, content_format=form)
            params = request.build_chat_params(None, "auto").with_defaults(
                {"tools": tools, "tokenize": False}
            )
            kwargs = params.get_apply_chat_template_kwargs()
            return str(tokenizer.apply_chat_template(conversation=conversation, messages=messages, **kwargs))

        return rendered

    return made


def mistral(version: str) -> Callable[[], Render]:
    """mistral_common's encoder of one version, over a vocabulary of its package."""

    def made() -> Render:
        tokenizer = MistralTokenizer.from_file(str(_tekken(version)))

        def rendered(given: Conversation) -> str:
            _, messages, tools = asked(given, None)
            for message in messages:
                for call in message.get("tool_calls") or []:
                    call["id"] = _call_id(call["id"], SHORT)
                if message.get("tool_call_id"):
                    message["tool_call_id"] = _call_id(message["tool_call_id"], SHORT)
            request: Any = MistralRequest.from_openai(messages, tools=tools)
            return str(tokenizer.encode_chat_completion(request).text)

        return rendered

    return made


def _tekken(version: str) -> Path:
    """A vocabulary of the package under another version of the format, with the control tokens that this one has."""
    document = json.loads((MISTRAL_DATA / "tekken_240911.json").read_text())
    document["config"]["version"] = version
    if int(version[1:]) > 7:
        known = list(dict.fromkeys(token.value for token in SpecialTokens))
        first = ["<unk>", "<s>", "</s>"]
        ordered = [*first, *(token for token in known if token not in first)]
        document["special_tokens"] = [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(ordered)
        ]
        document.pop("multimodal", None)
    path = Path(tempfile.mkdtemp()) / "tekken.json"
    path.write_text(json.dumps(document))
    return path


def harmony(folder: Path) -> Callable[[], Render]:
    """OpenAI's renderer of gpt-oss's format, as vLLM calls it."""

    def made() -> Render:
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(write_o200k(folder / "gptoss" / "tokenizer.json"))
        from vllm.entrypoints.openai.parser import harmony_utils as utils

        def rendered(given: Conversation) -> str:
            _, messages, tools = asked(given, None)
            request: Any = asked(given, None).request
            instructions, rest = utils.extract_instructions_from_messages(messages)
            preamble = utils.build_harmony_preamble(
                instructions=instructions,
                tools=request.tools if tools else None,
                reasoning_effort=None,
                with_custom_tools=tools is not None,
            )
            spoken = utils.parse_chat_inputs_to_harmony_messages(rest)
            ids = utils.render_for_completion([*preamble, *spoken])
            return str(utils.get_encoding().decode(ids))

        return rendered

    return made


def kimi(folder: Path) -> Callable[[], Render]:
    """Kimi K3's encoder, as vLLM and the model's tokenizer call it. Without an effort the tokenizer asks for the largest."""

    def made() -> Render:
        spec = importlib.util.spec_from_file_location("encoding_k3", folder / "encoding_k3.py")
        if spec is None or spec.loader is None:
            raise FileNotFoundError(folder / "encoding_k3.py")
        encoder = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = encoder
        spec.loader.exec_module(encoder)

        def rendered(given: Conversation) -> str:
            request, messages, tools = asked(given, None)
            conversation, _, _ = parse_chat_messages(messages, CONFIG, content_format="string")
            params = request.build_chat_params(None, "string").with_defaults({"tools": tools})
            kwargs = params.get_apply_chat_template_kwargs()
            _apply_k3_thinking_kwargs(kwargs)
            if params.tool_choice not in (None, "auto"):
                kwargs["tool_choice"] = params.tool_choice
            kwargs = {"thinking_effort": "max", **kwargs}
            segments = encoder.build_chat_segments(_normalize_k3_tool_messages(conversation), **kwargs)
            return "".join(segment.text for segment in segments)

        return rendered

    return made


def cohere(form: str, **options: Any) -> Callable[[], Render]:
    """Cohere's renderer of a format, as vLLM calls it, with the options that make the template's preamble."""

    def made() -> Render:
        render = getattr(importlib.import_module("cohere_melody"), f"render_{form}")

        def rendered(given: Conversation) -> str:
            request, messages, tools = asked(given, None)
            conversation, _, _ = parse_chat_messages(messages, CONFIG, content_format="openai")
            params = request.build_chat_params(None, "openai").with_defaults(
                {"tools": tools, "cohere_format": form, **options}
            )
            _, config = _build_render_config(conversation, dict(params.chat_template_kwargs))
            return str(render(config))

        return rendered

    return made


def _cohere_pairs(templates: Path) -> list[Pair]:
    found = INSTRUCTION.search((templates / "Cohere2MoE.jinja").read_text())
    said = found[1] if found else ""
    return [
        Pair("CohereForAI-c4ai-command-r7b-12-2024-tool_use", COHERE, cohere("cmd3", citation_quality="off")),
        Pair("Cohere2MoE", COHERE, cohere("cmd4", grounding="disabled", platform_instruction=said)),
    ]


def pairs(templates: Path, tokenizers: Path | None, kimi_k3: Path | None) -> list[Pair]:
    found = [
        Pair("deepseek-ai-DeepSeek-V3.2", DEEPSEEK, deepseek(get_deepseek_v32_tokenizer, "string")),
        Pair("deepseek-ai-DeepSeek-V4", DEEPSEEK, deepseek(get_deepseek_v4_tokenizer, "openai")),
        Pair("deepseek-ai-DeepSeek-V4-Flash-0731", DEEPSEEK, deepseek(get_deepseek_v4_tokenizer, "openai")),
        Pair("mistralai-Mistral-Nemo-Instruct-2407", MISTRAL, mistral("v3")),
        Pair("Mistral-Small-3.2-24B-Instruct-2506", MISTRAL, mistral("v11")),
        Pair("unsloth-mistral-Devstral-Small-2507", MISTRAL, mistral("v13")),
        Pair("mistralai-Ministral-3-14B-Reasoning-2512", MISTRAL, mistral("v13")),
    ]
    if tokenizers is not None:
        found.append(Pair("openai-gpt-oss-120b", {}, harmony(tokenizers)))
    if kimi_k3 is not None:
        found.append(Pair("Kimi-K3", {}, kimi(kimi_k3)))
    if importlib.util.find_spec("cohere_melody") is not None:
        found += _cohere_pairs(templates)
    return found


def compare(
    pair: Pair, source: str, change: Callable[[Conversation], Conversation] | None = None
) -> dict[str, tuple[str, str]]:
    """Both prompts of each conversation, or the refusals, by its name; of chats only, after `change`, if it is given."""
    ours, theirs = renders(ChatTemplate(source, pair.special_tokens)), pair.coded()
    found = {}
    for name, given in CONVERSATIONS.items():
        if given.images or (change and given.api != "chat"):
            continue
        sent = change(given) if change else given
        found[name] = _text(ours, sent), _text(theirs, sent)
    return found


def _text(rendered: Render, given: Conversation) -> str:
    try:
        return DATE.sub("DATE", rendered(given))
    except Exception as error:
        return f"refused: {type(error).__name__}: {error}".splitlines()[0][:160]


def differences(ours: str, theirs: str) -> list[str]:
    """The stretches in which two prompts differ, each with what stands before it; of refusals the reasons."""
    if ours.startswith("refused") or theirs.startswith("refused"):
        return [f"{ours[:60]!r} <> {theirs!r}"]
    one, other = WORD.findall(ours), WORD.findall(theirs)
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    return [
        f"{''.join(one[max(0, begin - 6) : begin])!r} + {''.join(one[begin:end])[:SHOWN]!r}"
        f" <> {''.join(other[first:last])[:SHOWN]!r}"
        for kind, begin, end, first, last in matcher.get_opcodes()
        if kind != "equal"
    ]


def _print(pair: Pair, source: str, found: dict[str, tuple[str, str]]) -> None:
    """How many prompts are the same, and the differences of the others, the most frequent first."""
    same = [name for name, (ours, theirs) in found.items() if ours == theirs]
    refused = [name for name, (ours, theirs) in found.items() if theirs.startswith("refused")]
    ways = (renders(ChatTemplate(source, pair.special_tokens)), pair.coded())
    ours_right, theirs_right = (sum(not judge(way, CONVERSATIONS[name]) for name in found) for way in ways)
    print(
        f"{pair.template}: {len(same)} of {len(found)} the same; {len(refused)} refused by the code;"
        f" {ours_right} right by the template, {theirs_right} by the code"
    )
    groups: dict[str, dict[str, None]] = {}
    for name, (ours, other) in found.items():
        for text in differences(ours, other) if ours != other else ():
            groups.setdefault(text, {})[name] = None
    for text, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"  {len(names)} x {text}: {', '.join(list(names)[:4])}")


def main() -> int:
    """Print for each template which conversations have another prompt by the model's code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--templates", type=Path, required=True, help="a folder of *.jinja files")
    parser.add_argument("--tokenizers", type=Path, help="a folder with gptoss/tokenizer.json")
    parser.add_argument("--kimi", type=Path, help="a folder with encoding_k3.py")
    parser.add_argument("--show", default="", help="print both prompts of this conversation")
    parser.add_argument("names", nargs="*", help="templates; all without any")
    given = parser.parse_args()
    for pair in pairs(given.templates, given.tokenizers, given.kimi):
        if given.names and pair.template not in given.names:
            continue
        source = (given.templates / f"{pair.template}.jinja").read_text()
        found = compare(pair, source)
        _print(pair, source, found)
        if given.show in found:
            ours, other = found[given.show]
            print(f"--- by the template:\n{ours}\n--- by the code:\n{other}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
