"""The tokenizer of the small real model with its first 4,096 tokens only.

Copies of a tokenizer are most of the start of an engine with a tiny model: vLLM makes about ten for a model that takes images, each of which
parses 3.5 MB of JSON (6 s of processor time). Merges are in the order of their tokens, so the first ones form a tokenizer of their own.
"""

from typing import Any, Final

SIZE: Final = 4_096


def shortened(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The document of `tokenizer.json`, whose model is a BPE in the order of its merges, without the tokens from `SIZE` on."""
    model = tokenizer["model"]
    vocabulary = {piece: number for piece, number in model["vocab"].items() if number < SIZE}
    merges = [pair for pair in model["merges"] if "".join(pair) in vocabulary]
    return {**tokenizer, "model": {**model, "vocab": vocabulary, "merges": merges}}
