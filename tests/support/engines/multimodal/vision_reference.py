"""What Hugging Face's implementation of the tiny vision model answers: independent of every engine and of the edge's prompts."""

import asyncio
import base64
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.clients.media_chat import ANSWER_TOKENS
from tests.support.engines.multimodal import tiny_vision_model
from tests.support.media.embeddings import embedding_file
from tests.support.processes import zygote

RUN_VISION = "from tests.support.engines.multimodal.vision_reference import encode; encode()"
RUN_VECTORS = "from tests.support.engines.multimodal.vision_reference import pool; pool()"
RUN = "from tests.support.engines.multimodal.vision_reference import main; main()"
TIMEOUT_S = 120


async def reference_answers(folder: Path, *questions: Sequence[str]) -> list[str]:
    """The text of the greedy answer to each question: parts as in `media_chat.ask`. A file with them is written to `folder`."""
    file = folder / "questions.json"
    file.write_text(json.dumps(questions))
    answers: list[str] = await _printed(RUN, file)
    return answers


async def reference_vectors(folder: Path, *prompts: Sequence[str]) -> list[list[float]]:
    """The last hidden state of each prompt's last token, of length one: parts as in `media_chat.ask`, without a generation prompt."""
    file = folder / "prompts.json"
    file.write_text(json.dumps(prompts))
    vectors: list[list[float]] = await _printed(RUN_VECTORS, file)
    return vectors


async def reference_embeddings(folder: Path, *urls: str) -> list[bytes]:
    """Each image's embedding with its grid, as a client would send it."""
    file = folder / "images.json"
    file.write_text(json.dumps(urls))
    return [base64.b64decode(one) for one in await _printed(RUN_VISION, file)]


async def _printed(program: str, file: Path) -> Any:
    # Forked from the process that has imported PyTorch.
    process = await zygote.start("-c", program, str(file), stdout=zygote.PIPE, vllm=True)
    async with asyncio.timeout(TIMEOUT_S):
        output, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


def encode() -> None:
    """Print the embeddings of the images of a file, as JSON."""
    import torch
    from PIL import Image
    from transformers import Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor

    torch.set_num_threads(1)
    folder = str(tiny_vision_model.ensure())
    processor = Qwen2VLImageProcessor.from_pretrained(folder)
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder).eval()
    found = []
    for url in json.loads(Path(sys.argv[1]).read_text()):
        image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
        features = processor(images=[image], return_tensors="pt")
        with torch.no_grad():
            [values] = model.get_image_features(**features).pooler_output
        grid = tuple(features["image_grid_thw"][0].tolist())
        found.append(base64.b64encode(embedding_file(values.float().numpy(), grid)).decode())
    print(json.dumps(found))


class _Reference:
    """The model with its tokenizer and its image processor."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor

        torch.set_num_threads(1)
        folder = str(tiny_vision_model.ensure())
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessor.from_pretrained(folder)
        self.model = Qwen2VLForConditionalGeneration.from_pretrained(folder).eval()

    def inputs(self, parts: list[str], *, generates: bool) -> dict[str, Any]:
        """The model's arguments for a message of these parts; `generates`: with the generation prompt."""
        import torch
        from PIL import Image

        pad = self.tokenizer.decode([self.model.config.image_token_id])
        content = [
            {"type": "image"} if part.startswith("data:") else {"type": "text", "text": part}
            for part in parts
        ]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=generates
        )
        files = [base64.b64decode(part.partition(",")[2]) for part in parts if part.startswith("data:")]
        features: Any = {}
        if files:
            features = self.processor(
                images=[Image.open(io.BytesIO(file)) for file in files], return_tensors="pt"
            )
            pieces = text.split(pad)
            for number, grid in enumerate(features["image_grid_thw"]):
                pieces[number] += pad * (int(grid.prod()) // self.processor.merge_size**2)
            text = "".join(pieces)
        tokens = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "mm_token_type_ids": (tokens == self.model.config.image_token_id).long(),
            **features,
        }


def pool() -> None:
    """Print the vectors of the prompts of a file, as JSON."""
    import torch

    reference = _Reference()
    found = []
    for parts in json.loads(Path(sys.argv[1]).read_text()):
        with torch.no_grad():
            states = reference.model.model(**reference.inputs(parts, generates=False)).last_hidden_state
        found.append(torch.nn.functional.normalize(states[0, -1], dim=0).tolist())
    print(json.dumps(found))


def main() -> None:
    """Print the answers to the questions of a file, as JSON."""
    reference = _Reference()

    def answer(parts: list[str]) -> str:
        inputs = reference.inputs(parts, generates=True)
        found = reference.model.generate(
            **inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        new = found[0, inputs["input_ids"].shape[1] :]
        return str(reference.tokenizer.decode(new, skip_special_tokens=True))

    print(json.dumps([answer(parts) for parts in json.loads(Path(sys.argv[1]).read_text())]))
