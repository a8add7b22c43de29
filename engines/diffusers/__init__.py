"""Images by Hugging Face's diffusers: one pipeline per worker, in its process."""

from headwater.engines.traits import EngineTraits

TRAITS = EngineTraits(loads="pipeline")
