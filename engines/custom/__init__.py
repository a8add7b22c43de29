"""An engine of your own in one file: a class with two methods.

    class Echo:
        async def start(self, setup: EngineSetup) -> EngineInfo:
            return setup.info()

        async def generate(self, request: EngineRequest) -> AsyncIterator[int]:
            for token in request.tokens:
                yield token

`headwater up --engine echo.py` serves it. A class that defines an optional method has the capability that it stands for:
see `METHODS`. All methods run on the event loop of the worker: whatever takes long belongs in a thread or a process.
"""

from headwater.engines.custom.api import (
    BLOCK_SIZE,
    FEATURES,
    METHODS,
    CustomEngineClass,
    EngineRequest,
    EngineSetup,
    Output,
    PoolingRequest,
    declared_capabilities,
)
from headwater.engines.custom.engine import CustomEngine
from headwater.engines.engine import (
    EngineError,
    EngineInfo,
    EngineLoad,
    EngineUnavailable,
    FileStep,
    Finish,
    KvEvent,
    LoraAdapter,
    Pinned,
    RequestRejected,
    Step,
    Transfer,
)
from headwater.schemas import hashing
from headwater.schemas.events import BlocksCleared, BlocksRemoved, BlocksStored, KvGap
from headwater.schemas.inference import ImageRequest, VideoRequest
from headwater.schemas.tables import ImageGenerationSupport, VideoGenerationSupport

__all__ = [
    "BLOCK_SIZE",
    "FEATURES",
    "METHODS",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "CustomEngine",
    "CustomEngineClass",
    "EngineError",
    "EngineInfo",
    "EngineLoad",
    "EngineRequest",
    "EngineSetup",
    "EngineUnavailable",
    "FileStep",
    "Finish",
    "ImageGenerationSupport",
    "ImageRequest",
    "KvEvent",
    "KvGap",
    "LoraAdapter",
    "Output",
    "Pinned",
    "PoolingRequest",
    "RequestRejected",
    "Step",
    "Transfer",
    "VideoGenerationSupport",
    "VideoRequest",
    "declared_capabilities",
    "hashing",
]
