"""Formats found in chat templates: pieces in the manner of each family's."""

import pytest

from headwater.actors.edge.parsing.selection import detect

TEMPLATES = {
    ("hermes", "think"): "{{ '<tool_call>\n{\"name\": \"' }} … </tool_call> {{ '<think>\n\n</think>' }}",
    ("hermes", ""): "<tool_call> </tool_call>",
    ("qwen3_coder", ""): "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    ("glm", "think"): "<tool_call>{name}<arg_key>{key}</arg_key> </think>",
    ("deepseek_v3", ""): "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>' + name + '\\n```json\\n'",
    ("deepseek_v31", "think"): "<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' </think>",
    ("mistral", "mistral"): "[TOOL_CALLS] [THINK]",
    ("mistral", ""): "[TOOL_CALLS]",
    ("kimi_k2", "think"): "<|tool_calls_section_begin|> </think>",
    ("minimax_m2", "think"): '<minimax:tool_call> <invoke name="…"> </think>',
    ("gemma4", "gemma4"): "<|tool_call>call: <|channel>thought",
    ("harmony", "harmony"): "<|start|>assistant<|channel|>final<|message|>",
    ("llama3_json", ""): '<|start_header_id|> {"name": function name, "parameters": …}',
    ("pythonic", ""): "<|header_start|> tools <|python_start|>",
    ("seed_oss", "seed_oss"): "<seed:tool_call>\n<function=…>\n<parameter=…> <tool_call> </seed:think>",
    ("longcat", ""): "<longcat_tool_call>",
    ("lfm2", ""): "<|tool_call_start|>[…]<|tool_call_end|>",
    ("cohere_command", "cohere_command"): "<|START_THINKING|> <|START_ACTION|>",
    ("functiongemma", ""): "<start_function_call>call:",
    ("dots", ""): '<dots_function_call>\n<invoke name="…">',
    ("step3", "think"): '<steptml:invoke name="…"> </think>',
    ("k2_horizon", "k2_horizon"): "<ifm|tool_call> </ifm|think>",
    ("apertus", "apertus"): "<|tools_prefix|> <|inner_prefix|>",
    ("plamo3", "plamo3"): "<|plamo:begin_tool_name:plamo|> <|plamo:begin_think:plamo|>",
    ("hunyuan", "think"): "<tool_call>{name}<tool_sep><arg_key> </think>",
    (
        "hunyuan",
        "hunyuan",
    ): "<tool_call:opensource>{name}<tool_sep:opensource><arg_key:opensource> </think:opensource>",
    ("internlm", ""): "<|action_start|><|plugin|>",
    ("hermes", "granite"): "<tool_call> Here is my thought process: Here is my response:",
    ("", "kimi"): "◁/think▷",
    ("", ""): "<|im_start|>{{ message.role }}",
}


@pytest.mark.parametrize(
    ("formats", "template"),
    TEMPLATES.items(),
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)
def test_a_template_shows_the_formats(formats: tuple[str, str], template: str) -> None:
    found = detect(template)
    assert (found.tool_format, found.reasoning_format) == formats
    assert found.tool_reason.startswith(
        "the chat template has " if formats[0] else "no marker of a known format"
    )
    assert found.starts == {"": "never", "harmony": "never"}.get(formats[1], "prompt")


def test_without_a_template_tokens_decide() -> None:
    found = detect("", added_tokens=["｜DSML｜", "<think>", "</think>"])
    assert (found.tool_format, found.reasoning_format) == ("deepseek_v32", "think")
    assert found.tool_reason == "the tokenizer has ｜DSML｜"


def test_reasoning_may_be_left_to_the_model() -> None:
    found = detect("<tool_call>", added_tokens=["<tool_call>", "<think>", "</think>"])
    assert (found.reasoning_format, found.reasoning_reason) == ("think", "the tokenizer has </think>")


def test_other_models_are_not_taken_for_known_ones() -> None:
    assert detect("<function_calls><invoke").tool_format == ""
    assert detect("").tool_reason == "no marker of a known format in nothing: there is no chat template"
