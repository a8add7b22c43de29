"""The choice of a parser for one answer, from the names of formats, or detected from a model's folder.

The names of vLLM 0.32 (`--tool-call-parser`, `--reasoning-parser`) and SGLang 0.5.23 (the same flags) are accepted too.

A template shows past calls in the form in which the model writes new ones, so the markers of a format are in it. Where
there is none (some models come with a program instead), the added tokens are what is left.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from headwater.actors.edge.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from headwater.actors.edge.parsing.grammar import Context, Output, OutputParser, offered_tools
from headwater.actors.edge.parsing.reader import WHITESPACE, Reader
from headwater.actors.edge.parsing.regions import Regions
from headwater.actors.edge.parsing.response_template import ResponseTemplate, TemplateRegions

NONE: Final = "none"
"""Switches a parser off."""

RESPONSE_TEMPLATE: Final = "response_template"
"""The format that a model's own `response_template` describes."""

FORCED: Final = ("forced_call", "forced_calls")
"""Formats of requests, not of models."""

TOOL_ALIASES: Final[Mapping[str, str]] = {
    # vLLM
    "deepseek_v4": "deepseek_v32",
    "deepseek_v41": "deepseek_v32",
    "glm45": "glm",
    "glm47": "glm",
    "ling3": "glm",
    "hf": RESPONSE_TEMPLATE,
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "olmo3": "pythonic",
    "openai": "harmony",
    "cohere_command3": "cohere_command",
    "cohere_command4": "cohere_command",
    "apertus2509": "apertus",
    "ernie45": "hermes",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "hy_v3": "hunyuan",
    "poolside_v1": "glm",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    # SGLang
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v32",
    "deepseekv41": "deepseek_v32",
    "gpt-oss": "harmony",
    "interns1": "internlm",
    "llama3": "llama3_json",
    "minimax-m2": "minimax_m2",
    "nanbeige": "qwen3_coder",
    "qwen": "hermes",
    "qwen25": "hermes",
}

REASONING_ALIASES: Final[Mapping[str, str]] = {
    # vLLM
    "deepseek_r1": "think_opened",
    "deepseek_v3": "think",
    "deepseek_v4": "think",
    "deepseek_v41": "think",
    "glm45": "think",
    "glm47": "think",
    "hf": RESPONSE_TEMPLATE,
    "holo2": "think",
    "kimi_k2": "think",
    "ling3": "think",
    "mimo": "think",
    "minimax_m2": "think",
    "nemotron_v3": "think",
    "olmo3": "think",
    "openai_gptoss": "harmony",
    "cohere_command3": "cohere_command",
    "cohere_command4": "cohere_command",
    "granite_thinking_parser": "think",
    "hy_v3": "hunyuan",
    "minicpmv": "think",
    "poolside_v1": "think",
    "qwen3": "think",
    "step3p5": "think",
    # SGLang
    "deepseek-r1": "think_opened",
    "deepseek-v3": "think",
    "deepseek-v4": "think",
    "deepseek-v41": "think",
    "apertus2509": "apertus",
    "dots": "think",
    "gigachat35": "think_opened",
    "gpt-oss": "harmony",
    "interns1": "think",
    "minimax": "think",
    "nanbeige": "think",
    "nemotron_3": "think",
    "qwen3-thinking": "think",
    "step3": "think_opened",
}

TOOL_UNSUPPORTED: Final = frozenset(
    {
        *("hy_v4", "inkling", "minimax_m3", "muse_glimmer"),
        *("beam", "gigachat35", "iquest_q1", "minimax-m3", "muse", "spark25", "trinity"),
    }
)
"""Names of vLLM and SGLang for formats that are missing here."""

REASONING_UNSUPPORTED: Final = frozenset(
    {
        *("hy_v4", "inkling", "minimax_m2_append_think", "minimax_m3", "muse_glimmer"),
        *("beam", "iquest_q1", "minimax-append-think", "minimax-m3", "muse"),
    }
)


class UnknownParser(ValueError):
    """There is no parser of this name."""


def tool_format_of(name: str) -> str:
    """Return the tool format that `name` means, "" for `none`. Raises `UnknownParser`."""
    formats = {*TOOL_FORMATS, RESPONSE_TEMPLATE} - set(FORCED)
    return _format_of("--tool-parser", name, formats, TOOL_ALIASES, TOOL_UNSUPPORTED)


def reasoning_format_of(name: str) -> str:
    """Return the reasoning format that `name` means, "" for `none`. Raises `UnknownParser`."""
    formats = {*REASONING_FORMATS, RESPONSE_TEMPLATE}
    return _format_of("--reasoning-parser", name, formats, REASONING_ALIASES, REASONING_UNSUPPORTED)


def _format_of(
    flag: str, name: str, formats: Collection[str], aliases: Mapping[str, str], unsupported: Collection[str]
) -> str:
    if name == NONE:
        return ""
    if name in formats:
        return name
    if name in aliases:
        return aliases[name]
    names = sorted({*formats, *aliases, NONE})
    if name in unsupported:
        fault = "is a parser of vLLM or SGLang for a format that Headwater does not have"
    else:
        near = difflib.get_close_matches(name, names, n=1)
        fault = f"is no parser; did you mean {near[0]}?" if near else "is no parser"
    raise UnknownParser(f"{flag} {name}: this {fault} (accepted: {', '.join(names)})")


# The parser of one answer.

F = TypeVar("F")


class MissingFormat(ValueError):
    """There is no such format: a newer worker may have named it, or the model's template was not given."""


def make_parser(
    tool_format: str,
    reasoning_format: str,
    *,
    tools: Sequence[Mapping[str, Any]],
    starts_in_reasoning: bool,
    response_template: ResponseTemplate | None = None,
) -> OutputParser:
    """Return a parser for one answer. Raises `MissingFormat`.

    The formats are keys of TOOL_FORMATS and REASONING_FORMATS, `response_template` (then that must be given), or "" for none: calls, or
    reasoning with its markers, are text then. `tools` are the definitions that the request offers, in the form of any API: XML formats cast
    arguments by their schemas, and formats without markers recognise calls by their names. `starts_in_reasoning`: the prompt ends inside
    reasoning.
    """
    if RESPONSE_TEMPLATE in (tool_format, reasoning_format) and response_template is None:
        raise MissingFormat("the format response_template needs the model's response_template")
    reader, offered, parse_tools = Reader(), offered_tools(tools), bool(tool_format)
    if response_template is not None and tool_format in ("", RESPONSE_TEMPLATE):
        context = Context(reader, Output(WHITESPACE, WHITESPACE), offered, parse_tools=parse_tools)
        regions = TemplateRegions(context, response_template, parse_reasoning=bool(reasoning_format))
        return OutputParser(context, regions.read(inside=starts_in_reasoning))
    tool = _named(TOOL_FORMATS, tool_format)
    if response_template is not None and reasoning_format == RESPONSE_TEMPLATE:
        # A forced call behind reasoning.
        reasoning = response_template.reasoning_format()
    else:
        reasoning = _named(REASONING_FORMATS, reasoning_format)
    trim = reasoning.trim if reasoning is not None else ""
    out = Output(tool.trim if tool is not None else trim, trim)
    context = Context(reader, out, offered, parse_tools=parse_tools)
    grammar = Regions(context, tool, reasoning)
    return OutputParser(context, grammar.read(inside=starts_in_reasoning and reasoning is not None))


def _named(formats: Mapping[str, F], name: str) -> F | None:
    if not name:
        return None
    if name not in formats:
        raise MissingFormat(f"there is no format {name!r} (known: {', '.join(sorted(formats))})")
    return formats[name]


def starts_in_reasoning(
    reasoning_format: str, prompt: str, response_template: ResponseTemplate | None = None
) -> bool:
    """Return whether an answer to this rendered prompt begins inside reasoning.

    Only the prompt's end matters: its last hundred characters are enough. Text of users cannot be there.
    """
    if reasoning_format == RESPONSE_TEMPLATE:
        return response_template is not None and response_template.reasoning_at_end_of(prompt)
    reasoning = REASONING_FORMATS.get(reasoning_format)
    if reasoning is None or reasoning.starts == "never":
        return False
    end = prompt.rstrip()
    if end.endswith(reasoning.open):
        return True
    return reasoning.starts == "always" and not end.endswith(reasoning.close)


# Detection of formats, in the chat template and in the tokens that were added for it.

_TEMPLATE: Final = "the chat template"
_TOKENS: Final = "the tokenizer"


class _Rule(NamedTuple):
    """All of `markers` show `format`; if none of `without` is there as well."""

    format: str
    markers: tuple[str, ...]
    without: tuple[str, ...] = ()


# The first rule that holds decides: the more particular markers come first.
_TOOLS: Final = (
    _Rule("seed_oss", ("<seed:tool_call>",)),
    _Rule("longcat", ("<longcat_tool_call>",)),
    _Rule("lfm2", ("<|tool_call_start|>",)),
    _Rule("lfm2", ("<|tool_list_start|>",)),
    _Rule("lfm2", ("List of tools: [", "<|im_start|>")),
    _Rule("cohere_command", ("<|START_ACTION|>",)),
    _Rule("command_r", ("Action:\\n```json", "tool_name")),
    _Rule("phi4_mini_json", ("functools[",)),
    _Rule("solar_open", ("<|tool_call:begin|>",)),
    _Rule("nemotron_nano_v2", ("<TOOLCALL>",)),
    _Rule("gigachat3", ("<|function_call|>",)),
    _Rule("gigachat3", ("function call", "<|role_sep|>")),
    _Rule("functiongemma", ("<start_function_call>",)),
    _Rule("dots", ("<dots_function_call>",)),
    _Rule("step3", ("<steptml:invoke",)),
    _Rule("k2_horizon", ("<ifm|tool_call>",)),
    _Rule("apertus", ("<|tools_prefix|>",)),
    _Rule("plamo3", ("<|plamo:begin_tool_name:plamo|>",)),
    _Rule("hunyuan", ("<tool_call", "<tool_sep")),
    _Rule("internlm", ("<|action_start|>", "<|plugin|>")),
    _Rule("harmony", ("<|channel|>", "<|start|>")),
    _Rule("gemma4", ("<|tool_call>",)),
    _Rule("kimi_k2", ("<|tool_calls_section_begin|>",)),
    _Rule("kimi_k3", ("<|open|>", "<|sep|>")),
    _Rule("deepseek_v32", ("｜DSML｜",)),
    _Rule("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    _Rule("deepseek_v31", ("<｜tool▁sep｜>",)),
    _Rule("minimax_m2", ("<minimax:tool_call>", "<invoke name=")),
    _Rule("glm", ("<tool_call>", "<arg_key>")),
    _Rule("qwen3_coder", ("<function=", "<parameter=")),
    _Rule("minicpm5", ('<function name="', '<param name="')),
    _Rule("functionary_v31", ("<function=", "</function>")),
    _Rule("granite", ("<|tool_call|>",)),
    _Rule("minimax_m1", ("<tool_calls>", "<end_of_sentence>")),
    _Rule("jamba", ("<tool_calls>[", "</tool_calls>")),
    _Rule("mistral", ("[TOOL_CALLS]",)),
    _Rule("hermes", ("<tool_call>",)),
    _Rule("pythonic", ("<function_calls>",), without=("<invoke",)),
    _Rule("pythonic", ("<|header_start|>", "<|python_start|>")),
    _Rule("pythonic", ("<|header_start|>", "tools")),
    _Rule("llama3_json", ("<|start_header_id|>", '"parameters"')),
)

_REASONING: Final = (
    _Rule("seed_oss", ("</seed:think>",)),
    _Rule("cohere_command", ("<|START_THINKING|>",)),
    _Rule("k2_horizon", ("</ifm|think>",)),
    _Rule("apertus", ("<|inner_prefix|>",)),
    _Rule("plamo3", ("<|plamo:begin_think:plamo|>",)),
    _Rule("hunyuan", ("</think:opensource>",)),
    _Rule("kimi", ("◁/think▷",)),
    _Rule("granite", ("Here is my thought process:", "Here is my response:")),
    _Rule("harmony", ("<|channel|>", "<|start|>")),
    _Rule("gemma4", ("<|channel>",)),
    _Rule("kimi_k3", ("<|open|>", "<|sep|>")),
    _Rule("mistral", ("[THINK]",)),
    _Rule("think", ("</think>",)),
)


class Detected(NamedTuple):
    """The formats of a model ("" for none), and one line of reason for each."""

    tool_format: str
    tool_reason: str
    reasoning_format: str
    reasoning_reason: str

    @property
    def starts(self) -> str:
        """When an answer begins inside reasoning: "prompt" (the rendered prompt ends there), "always" or "never"."""
        reasoning_format = REASONING_FORMATS.get(self.reasoning_format)
        return (
            reasoning_format.starts
            if reasoning_format is not None
            else "prompt"
            if self.reasoning_format
            else "never"
        )


def detect(
    template: str, *, added_tokens: Collection[str] = (), has_response_template: bool = False
) -> Detected:
    """Find the formats in a chat template's source and the tokens that the tokenizer adds to its vocabulary."""
    if has_response_template:
        reason = "tokenizer_config.json has a response_template"
        return Detected(RESPONSE_TEMPLATE, reason, RESPONSE_TEMPLATE, reason)
    tokens = "\n".join(added_tokens)
    return Detected(*_decide(_TOOLS, template, tokens), *_decide(_REASONING, template, tokens))


def _decide(rules: tuple[_Rule, ...], template: str, tokens: str) -> tuple[str, str]:
    sources = [(_TEMPLATE, template)] if template else [(_TOKENS, tokens)]
    if template and (rules is _REASONING or "tools" not in template):
        # A template may leave both to the model, which was trained to write these tokens.
        sources.append((_TOKENS, tokens))
    for where, text in sources:
        for rule in rules:
            if all(marker in text for marker in rule.markers) and not any(
                other in text for other in rule.without
            ):
                return rule.format, f"{where} has {' and '.join(rule.markers)}"
    looked = " nor ".join(where for where, text in sources if text) or "nothing: there is no chat template"
    return "", f"no marker of a known format in {looked}"
