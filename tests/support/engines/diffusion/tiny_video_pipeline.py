"""A text-to-video pipeline in diffusers' layout that a CPU runs in milliseconds: the parts of Wan, tiny and random."""

import importlib
from pathlib import Path
from typing import Any

SIDE = 64
LATENT_CHANNELS = 16
TEXT_SIZE = 16


def make(folder: Path) -> Path:
    """Write the pipeline; returns its folder. Imports torch and diffusers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    # Its classes have no types.
    library: Any = importlib.import_module("diffusers")
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = ["<pad>", "</s>", "<unk>", *letters]
    words = Tokenizer(
        models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    text = UMT5EncoderModel(
        UMT5Config(vocab_size=len(pieces), d_model=TEXT_SIZE, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    transformer = library.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_SIZE,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
    )
    decoder = library.AutoencoderKLWan(base_dim=4, z_dim=LATENT_CHANNELS, num_res_blocks=1)
    pipeline = library.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text,
        transformer=transformer,
        vae=decoder,
        scheduler=library.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )
    pipeline.save_pretrained(folder)
    return folder
