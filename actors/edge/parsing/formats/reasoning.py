"""How models mark their reasoning."""

from typing import Final

from headwater.actors.edge.parsing.grammar.format import ReasoningFormat

THINK: Final = ReasoningFormat()
"""`<think>…</think>`: DeepSeek R1, Qwen 3, GLM, Kimi K2, MiniMax and most others."""
