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
RUN = "from tests.support.engines.multimodal.vision_reference import main; main()"
TIMEOUT_S = 120


async def reference_answers(folder: Path, *questions: Sequence[str]) -> list[str]:
    """The text of the greedy answer to each question: parts as in `media_chat.ask`. A file with them is written to `folder`."""
    file = folder / "questions.json"
    file.write_text(json.dumps(questions))
    answers: list[str] = await _printed(RUN, file)
    return answers


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


def main() -> None:
    """Print the answers to the questions of a file, as JSON."""
    import torch
    from PIL import Image
    from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor

    torch.set_num_threads(1)
    folder = str(tiny_vision_model.ensure())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Qwen2VLImageProcessor.from_pretrained(folder)
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder).eval()
    pad = tokenizer.decode([model.config.image_token_id])

    def answer(parts: list[str]) -> str:
        content = [
            {"type": "image"} if part.startswith("data:") else {"type": "text", "text": part}
            for part in parts
        ]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        files = [base64.b64decode(part.partition(",")[2]) for part in parts if part.startswith("data:")]
        features = processor(images=[Image.open(io.BytesIO(file)) for file in files], return_tensors="pt")
        pieces = text.split(pad)
        for number, grid in enumerate(features["image_grid_thw"]):
            pieces[number] += pad * (int(grid.prod()) // processor.merge_size**2)
        tokens = tokenizer("".join(pieces), return_tensors="pt", add_special_tokens=False).input_ids
        found = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            mm_token_type_ids=(tokens == model.config.image_token_id).long(),
            **features,
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        text = tokenizer.decode(found[0, tokens.shape[1] :], skip_special_tokens=True)
        return str(text)

    print(json.dumps([answer(parts) for parts in json.loads(Path(sys.argv[1]).read_text())]))
