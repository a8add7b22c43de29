"""An engine in one file: its limits, its ends, and what its mistakes cost."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from headwater.engines.custom import (
    CustomEngine,
    EngineInfo,
    EngineRequest,
    EngineSetup,
    Output,
    Step,
    declared_capabilities,
)
from headwater.engines.engine import EngineDied, EngineError, EngineUnavailable, RequestRejected
from headwater.engines.model_files import byte_model_files
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import GenerateRequest, Sampling

SETUP = EngineSetup("w0", "both", None, byte_model_files("mine"))
EOS = SETUP.files.eos_token_ids[0]
PROMPT = (5, 6, 7)


class Fixed:
    """Yields what its options say, then raises if they say so."""

    outputs: tuple[Output, ...] = (1, 2, 3)
    error: BaseException | None = None
    forever = False

    def __init__(self, **changes: Any) -> None:
        self.closed = 0
        vars(self).update(changes)

    async def start(self, setup: EngineSetup) -> EngineInfo:
        return setup.info(context_length=64, max_running=2)

    async def generate(self, request: EngineRequest) -> AsyncIterator[Output]:
        try:
            for output in self.outputs:
                yield output
            if self.error is not None:
                raise self.error
            if self.forever:
                await asyncio.Event().wait()
        finally:
            self.closed += 1


class Answer:
    """The steps of one request."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.done = asyncio.Event()

    def emit(self, step: Step) -> None:
        assert not self.done.is_set(), step
        self.steps.append(step)
        if step.finish:
            self.done.set()

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]

    async def finish(self) -> str:
        async with asyncio.timeout(10):
            await self.done.wait()
        return self.steps[-1].finish


def request(number: int = 0, **sampling: Any) -> GenerateRequest:
    settings = Sampling(**{"max_tokens": 8, **sampling})
    return GenerateRequest(f"r{number}-1", "e0", number, pack_tokens(list(PROMPT)), settings)


async def run(engine: Any, **sampling: Any) -> tuple[Answer, CustomEngine]:
    made = CustomEngine("mine", engine, SETUP)
    await made.start()
    answer = Answer()
    made.submit(request(**sampling), answer.emit)
    await answer.finish()
    return answer, made


@pytest.mark.parametrize(
    ("outputs", "sampling", "tokens", "finish"),
    [
        ((1, 2, 3), {}, [1, 2, 3], "stop"),
        ((1, (2, 3), [4]), {"max_tokens": 3}, [1, 2, 3], "length"),
        ((1, (2, 3, 4)), {"max_tokens": 2}, [1, 2], "length"),
        ((1, 2, 3), {"stop_token_ids": (2,)}, [1, 2], "stop"),
        (((1, 2, 3),), {"stop_token_ids": (2,), "max_tokens": 2}, [1, 2], "stop"),
        ((1, EOS, 3), {}, [1, EOS], "stop"),
        ((1, EOS, 3), {"ignore_eos": True, "max_tokens": 3}, [1, EOS, 3], "length"),
        ((EOS, EOS, 3), {"min_tokens": 2}, [EOS, EOS], "stop"),
        ((1, Step((2,), "length"), 3), {}, [1, 2], "length"),
        ((), {}, [], "stop"),
    ],
)
async def test_answer_is_cut_where_the_request_says(
    outputs: tuple[Output, ...], sampling: dict[str, Any], tokens: list[int], finish: str
) -> None:
    engine = Fixed(outputs=outputs)
    answer, made = await run(engine, **sampling)
    assert (answer.tokens, answer.steps[-1].finish) == (tokens, finish)
    await made.stop()
    assert engine.closed == 1


async def test_exception_ends_the_engine_with_its_traceback_in_the_log() -> None:
    """Every request gets an error, `check` says so, the first cause is kept, and nothing is accepted any more."""
    engine = Fixed(outputs=(1,), error=ZeroDivisionError("the user's bug"))
    made = CustomEngine("mine", engine, SETUP)
    await made.start()
    answers = [Answer() for _ in range(3)]
    with capture_logs() as lines:
        for number, answer in enumerate(answers):
            made.submit(request(number), answer.emit)
        assert [await answer.finish() for answer in answers] == ["fatal", "error", "error"]
    [line] = lines
    assert (line["event"], type(line["exc_info"])) == ("engine_code_failed", ZeroDivisionError)
    assert all("ZeroDivisionError: the user's bug" in answer.steps[-1].detail for answer in answers)
    with pytest.raises(EngineDied, match="the user's bug"):
        await made.check()
    with pytest.raises(EngineDied):
        made.submit(request(9), Answer().emit)
    await made.stop()


@pytest.mark.parametrize("wrong", [None, "text", (1, "2"), 1.5])
async def test_wrong_output_names_what_to_yield(wrong: Any) -> None:
    answer, made = await run(Fixed(outputs=(wrong,)))
    assert answer.steps[-1].finish == "fatal"
    assert "yield a token id" in answer.steps[-1].detail
    await made.stop()


async def test_rejection_concerns_its_request_only() -> None:
    answer, made = await run(Fixed(outputs=(), error=RequestRejected("not this one", param="seed")))
    assert answer.steps == [Step((), "rejected", detail="not this one", param="seed")]
    await made.check()
    answer, made = await run(Fixed(outputs=(), error=EngineError("its KV is gone")))
    assert answer.steps == [Step((), "error", detail="its KV is gone")]
    await made.check()


async def test_abort_does_not_wait_for_code_that_will_not_end() -> None:
    """The last step comes at once, and is the last one even if the generator continues."""

    class Stubborn(Fixed):
        async def generate(self, request: EngineRequest) -> AsyncIterator[Output]:
            yield 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)
                yield 2

    made = CustomEngine("mine", Stubborn(), SETUP)
    await made.start()
    answer = Answer()
    made.submit(request(), answer.emit)
    while not answer.steps:
        await asyncio.sleep(0)
    made.abort("r0-1")
    assert await answer.finish() == "abort"
    assert answer.tokens == [1]
    await made.stop()
    assert made.load()[:2] == (0, 0)


async def test_no_more_requests_run_than_the_engine_says() -> None:
    made = CustomEngine("mine", Fixed(forever=True), SETUP)
    await made.start()
    answers = [Answer() for _ in range(3)]
    for number, answer in enumerate(answers):
        made.submit(request(number), answer.emit)
    while made.load().running < 2:
        await asyncio.sleep(0)
    assert made.load()[:2] == (2, 1)
    made.abort("r0-1")
    while not answers[2].tokens:
        await asyncio.sleep(0)
    await made.stop()
    assert [await answer.finish() for answer in answers] == ["abort"] * 3


async def test_start_that_fails_or_returns_nothing_is_a_death() -> None:
    class Broken(Fixed):
        async def start(self, setup: EngineSetup) -> EngineInfo:
            raise OSError("no weights")

    class Silent(Fixed):
        async def start(self, setup: EngineSetup) -> Any:
            return None

    with capture_logs() as lines:
        with pytest.raises(EngineDied, match="OSError: no weights"):
            await CustomEngine("mine", Broken(), SETUP).start()
        with pytest.raises(EngineDied, match=r"return an EngineInfo, such as setup.info\(\)"):
            await CustomEngine("mine", Silent(), SETUP).start()
    assert [line["event"] for line in lines] == ["engine_code_failed"] * 2


class Able(Fixed):
    """Everything optional, for declarations."""

    features = ("seed",)

    async def embed(self, request: object) -> object: ...
    async def load_lora(self, adapter: object) -> None: ...
    async def unload_lora(self, name: str) -> None: ...
    async def prefill(self, request: object) -> None: ...
    async def release(self, request: str, params: bytes) -> None: ...
    async def sleep(self, level: int) -> None: ...
    async def wake(self) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def profile(self, *, on: bool) -> None: ...
    async def kv_events(self) -> AsyncIterator[list[object]]:
        yield []

    async def clear_kv(self) -> None: ...


def test_methods_declare_capabilities() -> None:
    assert declared_capabilities(Fixed) == {"generate"}
    assert declared_capabilities(Able) == {
        "generate",
        "seed",
        "embed",
        "lora",
        "handoff",
        "sleep",
        "pause",
        "profile",
        "kv_events",
        "kv_dump",
        "clear_kv",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wake": None}, "defines sleep but not wake"),
        ({"release": None}, "defines prefill but not release"),
        ({"features": ("lora",)}, "'lora' is none of .* by defining their methods"),
        ({"choreography": "handshake"}, "'handshake' is none of returned, room, opaque"),
    ],
)
def test_declaration_that_is_not_whole_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineUnavailable, match=message):
        declared_capabilities(type("Odd", (Able,), changes))
