"""How models mark their reasoning."""

from typing import Final

from headwater.actors.edge.parsing.grammar.format import ReasoningFormat
from headwater.actors.edge.parsing.grammar.harmony import Harmony

THINK: Final = ReasoningFormat()
"""`<think>…</think>`: DeepSeek R1, Qwen 3, GLM, Kimi K2, MiniMax and most others."""

THINK_OPENED: Final = ReasoningFormat(starts="always")
"""The same for models that never write `<think>`, though their prompt does not end in it: QwQ, early DeepSeek R1."""

MISTRAL_THINK: Final = ReasoningFormat(open=("[THINK]", "<think>"), close=("[/THINK]", "</think>"))
"""`[THINK]…[/THINK]`: Magistral, Ministral. The first Magistral wrote `<think>`."""

GEMMA4_THOUGHT: Final = ReasoningFormat(open=("<|channel>thought",), close=("<channel|>",))
"""`<|channel>thought…<channel|>`: Gemma 4."""

KIMI_K3_THINK: Final = ReasoningFormat(
    open=("<|open|>think<|sep|>",),
    close=("<|close|>think<|sep|>",),
    trim="",
    framing=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ends_before=("<|open|>response<|sep|>",),
)
"""`<|open|>think<|sep|>…<|close|>think<|sep|>`, and the same markers around the response: Kimi K3."""

HARMONY_ANALYSIS: Final = ReasoningFormat(open=(), close=(), trim="", starts="never", whole=Harmony())
"""The analysis channel: gpt-oss."""

SEED_THINK: Final = ReasoningFormat(open=("<seed:think>",), close=("</seed:think>",))
"""`<seed:think>…</seed:think>`: Seed-OSS."""

GRANITE_THOUGHT: Final = ReasoningFormat(
    open=("Here is my thought process:", "Here's my thought process:"),
    close=("Here is my response:", "Here's my response:"),
    trim=" \t\r\n",
)
"""Two sentences in the place of markers: Granite 3.2 and 3.3."""

ERNIE45_THINK: Final = ReasoningFormat(framing=("<response>", "</response>", "</response>\n"))
"""`<think>…</think>`, and `<response>` around what follows: ERNIE 4.5."""

HUNYUAN_A13B_THINK: Final = ReasoningFormat(framing=("<answer>", "</answer>"))
"""`<think>…</think>`, and `<answer>` around what follows: Hunyuan A13B."""

HUNYUAN_THINK: Final = ReasoningFormat(
    open=("<think>", "<think:opensource>"), close=("</think>", "</think:opensource>")
)
"""`<think>…</think>`, with a suffix in the released tokenizer: Hunyuan 3."""

K2_HORIZON_THINK: Final = ReasoningFormat(
    open=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
    close=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
)
"""A marker for each of three efforts: K2 Horizon."""

COHERE_THINKING: Final = ReasoningFormat(
    open=("<|START_THINKING|>",),
    close=("<|END_THINKING|>",),
    framing=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ends_before=("<|START_RESPONSE|>", "<|START_TEXT|>"),
)
"""`<|START_THINKING|>…<|END_THINKING|>`, and markers around the response: Command A and later."""

PLAMO3_THINK: Final = ReasoningFormat(
    open=("<|plamo:begin_think:plamo|>",), close=("<|plamo:end_think:plamo|>",), framing=("<|plamo:tag|>",)
)
"""`<|plamo:begin_think:plamo|>…<|plamo:end_think:plamo|>`: PLaMo 3."""

APERTUS_INNER: Final = ReasoningFormat(open=("<|inner_prefix|>",), close=("<|inner_suffix|>",))
"""`<|inner_prefix|>…<|inner_suffix|>`: Apertus."""

KIMI_THINK: Final = ReasoningFormat(open=("◁think▷",), close=("◁/think▷",))
"""`◁think▷…◁/think▷`: Kimi-VL Thinking."""
