"""Images and videos by SGLang's diffusion runtime: its server in a process of its own, over its HTTP API."""

from headwater.engines.traits import EngineTraits

TRAITS = EngineTraits(
    launcher="headwater.engines.sglang_diffusion.engine:SglangDiffusionLauncher", loads="pipeline"
)
