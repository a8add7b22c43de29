"""A simulated engine that replays recorded outputs of models, token by token, and a `headwater` that starts it.

Everything else is the simulated engine: batching, prefix cache, KV events, aborts. Which output is replayed depends on
the prompt: the cue that occurs last in it. With guided decoding the answer is an instance of the schema. A model with control tokens for
images and audio takes these, and answers with what they are (`shown`).

    python -m tests.support.engines.scripted ANSWERS up --engine sim --model FOLDER …
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from tokenizers import Tokenizer

from headwater.engines.engine import Emit, Engine, Step, Transfer
from headwater.engines.launcher import WorkerSpec
from headwater.engines.model_files import ModelFiles
from headwater.engines.sim.engine import SimEngine, SimLauncher
from headwater.engines.sim.model import media_support
from headwater.engines.sim.scheduler import SimSequence, SimSettings
from headwater.ops import cli
from headwater.schemas import hashing
from headwater.schemas.clock import SystemClock
from headwater.schemas.inference import GenerateRequest, Guide
from headwater.schemas.media import PromptMedia
from headwater.schemas.tables import Capability, MediaSupport
from tests.support.engines.instances import instance_of

THOUGHT: Final = re.compile(r"^<think>.*?</think>\n*", re.DOTALL)
NOT_THINKING: Final = "</think>\n\n"
"""The end of a prompt whose template has been told not to think."""


class Answer(msgspec.Struct, frozen=True):
    """A recorded output, and the text in a prompt that calls for it. The answer with an empty cue is the default."""

    cue: str
    output: str


class ScriptedEngine(SimEngine):
    """See the module."""

    name = "scripted"
    capabilities: frozenset[Capability] = SimEngine.capabilities | {"guide"}

    def __init__(self, settings: SimSettings, files: ModelFiles, answers: tuple[Answer, ...]) -> None:
        super().__init__(settings, SystemClock())
        self._tokenizer = Tokenizer.from_buffer(files.tokenizer)
        self._answers = answers
        self._replayed: dict[str, list[int]] = {}

    def submit(self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None) -> None:
        """See `Engine.submit`."""
        prompt = hashing.unpack_tokens(request.tokens).tolist()
        given = prompt[: len(prompt) - request.emitted]
        text = self._tokenizer.decode(given, skip_special_tokens=False)
        output = self._output(text, request.sampling.guide)
        if request.media:
            output = shown(request.media)
        self._replayed[request.request] = self._tokenizer.encode(output, add_special_tokens=False).ids
        try:
            super().submit(request, emit, transfer)
        except Exception:
            del self._replayed[request.request]
            raise

    def _output(self, prompt: str, guide: Guide | None) -> str:
        if guide is not None:
            schema = msgspec.json.decode(guide.value) if guide.kind == "json_schema" else {}
            return msgspec.json.encode(instance_of(schema)).decode()
        output = max(
            self._answers, key=lambda answer: prompt.rfind(answer.cue) if answer.cue else -0.5
        ).output
        return THOUGHT.sub("", output) if prompt.endswith(NOT_THINKING) else output

    def _token(self, sequence: SimSequence) -> int:
        number = sequence.request.emitted + sequence.produced
        replayed = self._replayed[sequence.request.request]
        return replayed[number] if number < len(replayed) else self._settings.eos_token_id

    def _finish(self, sequence: SimSequence, step: Step) -> None:
        self._replayed.pop(sequence.request.request, None)
        super()._finish(sequence, step)


def shown(media: Sequence[PromptMedia]) -> str:
    """What decoded media are: an image's size and the sum of its values, or audio's samples."""
    return " and ".join(map(_shown, media))


def _shown(item: PromptMedia) -> str:
    if item.kind == "image":
        height, width, _ = item.shape
        return f"an image of {width} x {height} pixels, {sum(item.data)} in all"
    return f"{item.kind} of {item.shape[0]} samples"


def media_of(files: ModelFiles) -> MediaSupport:
    """What a model with control tokens for it takes: by the simulated model's rules."""
    tokenizer, own = Tokenizer.from_buffer(files.tokenizer), media_support()
    image, audio = (tokenizer.token_to_id(f"<|{kind}|>") for kind in ("image", "audio"))
    if image is None or audio is None:
        return MediaSupport()
    assert own.images is not None
    assert own.audio is not None
    return MediaSupport(
        images=msgspec.structs.replace(own.images, placeholder=image),
        audio=msgspec.structs.replace(own.audio, placeholder=audio),
    )


def main(path: str, *arguments: str) -> int:
    """Run a `headwater` whose simulated engine replays the answers of a file: JSON, a list of `Answer`."""
    answers = msgspec.json.decode(Path(path).read_bytes(), type=tuple[Answer, ...])

    def make(launcher: SimLauncher, worker: WorkerSpec, files: ModelFiles) -> Engine:
        settings = launcher.settings(worker, files)._replace(media=media_of(files))
        return ScriptedEngine(settings, files, answers)

    setattr(SimLauncher, "make", make)  # noqa: B010 (in this process)
    return cli.main(arguments)


def program(path: Path) -> tuple[str, ...]:
    """What runs `main` by fork from the zygote: see `tests.support.processes.fleet`."""
    code = "import sys; from tests.support.engines import scripted; sys.exit(scripted.main(*sys.argv[1:]))"
    return ("-c", code, str(path))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
