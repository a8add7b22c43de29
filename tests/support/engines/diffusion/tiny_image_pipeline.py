"""A text-to-image pipeline in diffusers' layout that a CPU runs in milliseconds: Stable Diffusion's parts, tiny and random."""

import importlib
import json
from pathlib import Path
from typing import Any

SIDE = 64
SCALE = 4
"""Pixels of a latent's side."""

POSITIONS = 77
"""As every CLIP has: SGLang assumes it."""


def make(folder: Path) -> Path:
    """Write the pipeline; returns its folder. Imports torch and diffusers."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    # Its classes have no types.
    library: Any = importlib.import_module("diffusers")
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    words = folder.parent / "words"
    words.mkdir()
    (words / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (words / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(
        str(words / "vocab.json"), str(words / "merges.txt"), model_max_length=POSITIONS
    )
    end = len(pieces) - 1
    torch.manual_seed(0)
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(pieces),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=POSITIONS,
            projection_dim=16,
            bos_token_id=end - 1,
            eos_token_id=end,
        )
    )
    unet = library.UNet2DConditionModel(
        sample_size=SIDE // SCALE,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    decoder = library.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 8),
        norm_num_groups=4,
    )
    pipeline = library.StableDiffusionPipeline(
        vae=decoder,
        text_encoder=text,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=library.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)
    return folder
