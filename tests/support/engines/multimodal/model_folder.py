"""The folder of a tiny multimodal model: the tokenizer of the small real model with further tokens, a template, and random values.

Made once, in the user's cache folder.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from headwater.ops.start import model
from tests.support.engines.made_once import made_once
from tests.support.engines.short_vocabulary import shortened

SCALE: Final = 0.3


def ensure(
    name: str,
    tokens: Sequence[str],
    template: str,
    write: Callable[[Path, dict[str, int]], None],
    *,
    short: bool = True,
) -> Path:
    """The folder `name` with the `tokens`; `write` adds its configuration and weights, given their ids.

    The tokenizer is `short`, unless the model has the real one's weights for its words.
    """

    def write_all(folder: Path) -> None:
        write(folder, _write_tokenizer(model.ensure(), folder, tokens, short=short))
        (folder / "chat_template.jinja").write_text(template)

    return made_once(name, write_all)


def _write_tokenizer(source: Path, folder: Path, tokens: Sequence[str], *, short: bool) -> dict[str, int]:
    """The tokenizer with these tokens; returns their ids, which are the highest."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    if short:
        tokenizer = shortened(tokenizer)
    known: list[int] = [
        *tokenizer["model"]["vocab"].values(),
        *(one["id"] for one in tokenizer["added_tokens"]),
    ]
    first = max(known) + 1
    ids = {name: first + place for place, name in enumerate(tokens)}
    forms = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tokenizer["added_tokens"] += [{"id": number, "content": name, **forms} for name, number in ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    decoder = settings.setdefault("added_tokens_decoder", {})
    decoder.update({str(number): {"content": name, **forms} for name, number in ids.items()})
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ids


class Draw:
    """Values of weights, the same each time.

    Not torch's: its threads would be missing in the engines that are forked from this process, which wait for them.
    """

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._draw = np.random.default_rng(seed)

    def matrix(self, *shape: int) -> Any:
        """Random values of this shape."""
        return (self._draw.standard_normal(shape) * SCALE).astype("f4")

    def norm(self, name: str, size: int) -> dict[str, Any]:
        """A layer norm that changes nothing."""
        import numpy as np

        return {f"{name}.weight": np.ones(size, np.float32), f"{name}.bias": np.zeros(size, np.float32)}

    def linear(self, name: str, rows: int, columns: int) -> dict[str, Any]:
        """A linear layer without a bias that does anything."""
        import numpy as np

        return {f"{name}.weight": self.matrix(rows, columns), f"{name}.bias": np.zeros(rows, np.float32)}

    def decoder(self, layers: int, hidden: int, inner: int) -> dict[str, Any]:
        """Qwen2's layers, with heads of equal number for queries and keys."""
        import numpy as np

        found: dict[str, Any] = {"norm.weight": np.ones(hidden, np.float32)}
        for layer in range(layers):
            at = f"layers.{layer}"
            for name in ("q_proj", "k_proj", "v_proj"):
                found |= self.linear(f"{at}.self_attn.{name}", hidden, hidden)
            found[f"{at}.self_attn.o_proj.weight"] = self.matrix(hidden, hidden)
            found[f"{at}.mlp.gate_proj.weight"] = self.matrix(inner, hidden)
            found[f"{at}.mlp.up_proj.weight"] = self.matrix(inner, hidden)
            found[f"{at}.mlp.down_proj.weight"] = self.matrix(hidden, inner)
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"{at}.{name}.weight"] = np.ones(hidden, np.float32)
        return found
