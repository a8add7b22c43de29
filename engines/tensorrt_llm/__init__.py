"""TensorRT-LLM behind the `Engine` protocol. Only this package imports `tensorrt_llm`, and only when an engine starts.

Written from its documented API; it has not run on hardware. What is called of it is recorded in `recorded`.
"""

from headwater.engines.traits import EngineTraits

TRAITS = EngineTraits(loads="weights", options="tensorrt_llm")
