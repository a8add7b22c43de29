"""A model that hears (Qwen2-Audio's architecture) small enough for a CPU, whose answers depend on all that is heard and on every token.

One layer hears and two speak, with random weights; the tokenizer is the small real model's with fewer tokens, and the three tokens for audio. Made once, in
the user's cache folder.
"""

import json
from pathlib import Path
from typing import Any, Final

from tests.support.engines.multimodal import model_folder
from tests.support.engines.short_vocabulary import SIZE

NAME: Final = "tiny-qwen2-audio-4"
HIDDEN, INNER, LAYERS, HEADS, EOS = 64, 128, 2, 2, 2
EAR, EAR_INNER, MELS = 32, 64, 80
RATE_HZ, HOP, WINDOW_S = 16_000, 160, 30
HEARD_SCALE: Final = 4.0
"""Of what is heard: two clips of noise are much alike, and answers about them must differ."""
POSITIONS: Final = WINDOW_S * RATE_HZ // HOP // 2
SAMPLES_PER_TOKEN: Final = 4 * HOP
MEDIA_TOKENS: Final = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def ensure() -> Path:
    """The model's folder."""
    return model_folder.ensure(NAME, MEDIA_TOKENS, TEMPLATE, _write)


def _write(folder: Path, ids: dict[str, int]) -> None:
    vocabulary = max(ids.values()) + 1
    documents: dict[str, Any] = {
        "config.json": {
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "model_type": "qwen2_audio",
            "audio_token_index": ids["<|AUDIO|>"],
            "dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": EOS,
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "d_model": EAR,
                "encoder_layers": 1,
                "encoder_attention_heads": HEADS,
                "encoder_ffn_dim": EAR_INNER,
                "num_mel_bins": MELS,
                "max_source_positions": POSITIONS,
                "activation_function": "gelu",
                "scale_embedding": False,
            },
            "text_config": {
                "model_type": "qwen2",
                "hidden_size": HIDDEN,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": HEADS,
                "hidden_act": "silu",
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
                "use_sliding_window": False,
                "vocab_size": vocabulary,
                "bos_token_id": 1,
                "eos_token_id": EOS,
            },
        },
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "processor_class": "Qwen2AudioProcessor",
            "feature_size": MELS,
            "sampling_rate": RATE_HZ,
            "hop_length": HOP,
            "n_fft": 400,
            "chunk_length": WINDOW_S,
            "n_samples": WINDOW_S * RATE_HZ,
            "nb_max_frames": 2 * POSITIONS,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": True,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    _write_weights(folder, vocabulary)


def _write_weights(folder: Path, vocabulary: int) -> None:
    from safetensors.numpy import save_file

    draw = model_folder.Draw(11)
    weights: dict[str, Any] = {
        "language_model.model.embed_tokens.weight": draw.matrix(vocabulary, HIDDEN),
        "language_model.lm_head.weight": draw.matrix(vocabulary, HIDDEN),
        "audio_tower.conv1.weight": draw.matrix(EAR, MELS, 3),
        "audio_tower.conv1.bias": draw.matrix(EAR),
        "audio_tower.conv2.weight": draw.matrix(EAR, EAR, 3),
        "audio_tower.conv2.bias": draw.matrix(EAR),
        "audio_tower.embed_positions.weight": draw.matrix(POSITIONS, EAR),
        **draw.norm("audio_tower.layer_norm", EAR),
        **draw.linear("multi_modal_projector.linear", HIDDEN, EAR),
    }
    weights["multi_modal_projector.linear.weight"] *= HEARD_SCALE
    # A prompt with an answer so far that has one would lack its item.
    weights["language_model.lm_head.weight"][SIZE:] = 0
    layer = "audio_tower.layers.0"
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        weights |= draw.norm(f"{layer}.{name}", EAR)
    for name, rows, columns in (
        ("self_attn.q_proj", EAR, EAR),
        ("self_attn.k_proj", EAR, EAR),
        ("self_attn.v_proj", EAR, EAR),
        ("self_attn.out_proj", EAR, EAR),
        ("fc1", EAR_INNER, EAR),
        ("fc2", EAR, EAR_INNER),
    ):
        weights |= draw.linear(f"{layer}.{name}", rows, columns)
    # Keys have no bias.
    del weights[f"{layer}.self_attn.k_proj.bias"]
    decoder = draw.decoder(LAYERS, HIDDEN, INNER)
    weights |= {f"language_model.model.{name}": value for name, value in decoder.items()}
    save_file(weights, folder / "model.safetensors")
