"""Images by Hugging Face's diffusers: one pipeline per worker, in its process."""

from headwater.engines.traits import EngineTraits

TRAITS = EngineTraits(launcher="headwater.engines.diffusers.engine:DiffusersLauncher", loads="pipeline")
