"""The model of the scripted fleet: a byte-level tokenizer with the tokens and the chat format of Qwen 3, and places for images and audio."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image|>", "<|audio|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CONTEXT = 65_536

TEMPLATE = """\
{%- macro shown(content) -%}
    {%- if content is string -%}{{- content -}}{%- else -%}
        {%- for part in content or [] -%}
            {{- part.text if part.type == 'text' else '<|' + part.type + '|>' -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro said(message) -%}
    {{- '<|im_start|>' + message.role + '\\n' + shown(message.content) -}}
{%- endmacro -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') -}}
    {{- 'Functions, as JSON schemas:\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools>\\nA call is written as\\n<tool_call>\\n{"name": …, "arguments": …}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>user\\n<tool_response>\\n' + shown(message.content) + '\\n</tool_response><|im_end|>\\n' -}}
    {%- elif not (tools and loop.first and message.role == 'system') -%}
        {{- said(message) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function -%}
            {{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
            {{- function.arguments | tojson + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""


def make(folder: Path, context: int = CONTEXT) -> Path:
    """Write the model into `folder`, in Hugging Face's layout; returns it."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    made.save(str(folder / "tokenizer.json"))
    end = made.token_to_id("<|im_end|>")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": made.get_vocab_size(),
        "max_position_embeddings": context,
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
