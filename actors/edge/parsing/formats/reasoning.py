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
