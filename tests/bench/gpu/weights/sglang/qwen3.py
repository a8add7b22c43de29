"""Qwen3 with scaled weights, under `--load-format dummy`."""

from sglang.srt.models import qwen3

from tests.bench.gpu.weights import scaled


class Qwen3ForCausalLM(qwen3.Qwen3ForCausalLM):
    """SGLang finds it by this name, the architecture in a model's configuration."""

    def post_load_weights(self) -> None:
        """Called by SGLang after it has filled the parameters with its own dummy weights."""
        scaled.fill(self.named_parameters())


EntryClass = Qwen3ForCausalLM
