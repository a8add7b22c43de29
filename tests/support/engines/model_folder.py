"""A model's folder in Hugging Face's layout without weights: made in milliseconds, for what only reads its files."""

import json
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
BOS, EOS = "<s>", "</s>"
CONTEXT = 200
TEXT = ("Where does a river begin and where does it end? ", "the quick brown fox jumps over the lazy dog ")


def tokenizer() -> Tokenizer:
    """A byte-level BPE with a few dozen merges: its counts are neither bytes nor words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[AddedToken(BOS, special=True), AddedToken(EOS, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text * 3 for text in TEXT], trainer)
    return made


def make(folder: Path, *, template: str = TEMPLATE, context: int = CONTEXT) -> Tokenizer:
    """Write one into `folder`, and return its tokenizer."""
    folder.mkdir(parents=True)
    made = tokenizer()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
    (folder / "chat_template.jinja").write_text(template)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": made.get_vocab_size(),
        "max_position_embeddings": context,
        "bos_token_id": made.token_to_id(BOS),
        "eos_token_id": made.token_to_id(EOS),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return made


def rendered(messages: list[dict[str, str]]) -> str:
    """A chat as the template has it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE).render(
        messages=messages, bos_token=BOS, eos_token=EOS, add_generation_prompt=True
    )
