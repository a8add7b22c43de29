"""Which formats a model's folder speaks of: found in the chat template, and in the tokens that were added for it.

A template shows past calls in the form in which the model writes new ones, so the markers of a format are in it. Where
there is none (some models come with a program instead), the added tokens are what is left.
"""

from collections.abc import Collection
from typing import Final, NamedTuple

from headwater.actors.edge.parsing.formats import REASONING_FORMATS
from headwater.actors.edge.parsing.selection.names import RESPONSE_TEMPLATE

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
        found = REASONING_FORMATS.get(self.reasoning_format)
        return found.starts if found is not None else "prompt" if self.reasoning_format else "never"


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
