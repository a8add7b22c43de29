"""Options of `headwater bench serve`, with distributions of lengths in tokens and their notation.

Light to import: the command line reads types, defaults and descriptions from here.
"""

import math
import re
from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple

from msgspec import Meta

from headwater.engines.traits import Text
from headwater.ops.config.setting import Flag

NOTATIONS: Final = {"uniform": "LOW,HIGH", "normal": "MEAN,DEVIATION", "lognormal": "MEAN,SIGMA"}
"""The numbers of each kind besides a constant. SIGMA is the standard deviation of the logarithm."""

FORMS: Final = "N, uniform:LOW,HIGH, normal:MEAN,DEVIATION or lognormal:MEAN,SIGMA"


class Lengths(NamedTuple):
    """A distribution of whole numbers: "constant" with one number, or a kind of `NOTATIONS` with two."""

    kind: str
    numbers: tuple[float, ...]

    def draw(self, random: Random) -> int:
        """A length, at least 1."""
        first, *other = self.numbers
        if self.kind == "uniform":
            return max(1, random.randint(round(first), round(other[0])))
        if self.kind == "normal":
            return max(1, round(random.gauss(first, other[0])))
        if self.kind == "lognormal":
            sigma = other[0]
            return max(1, round(random.lognormvariate(math.log(first) - sigma**2 / 2, sigma)))
        return max(1, round(first))

    def __str__(self) -> str:
        """Return the distribution as the command line spells it."""
        numbers = ",".join(f"{number:g}" for number in self.numbers)
        return numbers if self.kind == "constant" else f"{self.kind}:{numbers}"


def read_lengths(text: str) -> Lengths:
    """A distribution from its notation. Raises `ValueError`."""
    kind, colon, rest = text.strip().rpartition(":")
    kind = kind if colon else "constant"
    wrong = f"{text!r} is none of {FORMS}"
    if kind not in (*NOTATIONS, "constant"):
        raise ValueError(wrong)
    try:
        numbers = tuple(map(float, rest.split(",")))
    except ValueError:
        raise ValueError(wrong) from None
    if len(numbers) != (1 if kind == "constant" else 2) or not all(map(math.isfinite, numbers)):
        raise ValueError(wrong)
    if numbers[0] < 1 or min(numbers) < 0:
        raise ValueError(f"{text!r}: a length is at least 1, and a deviation at least 0")
    if kind == "uniform" and numbers[1] < numbers[0]:
        raise ValueError(f"{text!r}: the second number is less than the first")
    return Lengths(kind, numbers)


LENGTHS: Final = Text(read_lengths, str, "DIST", Any)


def constant(length: int) -> Lengths:
    """The same length always."""
    return Lengths("constant", (float(length),))


LIMITS: Final = {
    "ttft": "the time to first token",
    "itl": "a request's mean time between two tokens",
    "gap": "a request's longest time between two pieces of its answer",
    "e2e": "the time to the last token",
}
"""What `--slo` can limit."""

SYNTHETIC, CONVERSATIONS = "synthetic", "conversations"

_LIMIT = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


def read_limits(text: str) -> dict[str, float]:
    """Limits in milliseconds by measure, from `ttft=500ms,itl=50ms`. Raises `ValueError`."""
    limits: dict[str, float] = {}
    for word in text.split(",") if text else ():
        name, _, value = word.strip().partition("=")
        match = _LIMIT.fullmatch(value)
        if name not in LIMITS or match is None:
            raise ValueError(
                f"{word.strip()!r} is no limit: write {', '.join(LIMITS)} with a time in ms or s, as ttft=500ms,itl=50ms"
            )
        limits[name] = float(match[1]) * (1000 if match[2] == "s" else 1)
    return limits


def write_limits(limits: Mapping[str, float]) -> str:
    """Text that `read_limits` reads."""
    return ",".join(f"{name}={value:g}ms" for name, value in limits.items())


SLO: Final = Text(read_limits, write_limits, "LIMITS", Any)


class Traffic(NamedTuple):
    """What is sent."""

    workload: Annotated[
        str,
        Meta(
            description="synthetic; conversations, of several turns; or a file: a trace in Mooncake's format, or conversations in "
            "ShareGPT's"
        ),
    ] = SYNTHETIC
    requests: Annotated[
        int,
        Meta(
            ge=0,
            description="requests to send for each rate or concurrency, the first ones of a file; 0: all of it",
        ),
    ] = 200
    input_tokens: Annotated[
        Lengths,
        LENGTHS,
        Meta(
            description=f"tokens of a prompt, or of a turn of a conversation: {FORMS} (default: 1000; of conversations "
            "lognormal:161,1.2)"
        ),
    ] = Lengths("", ())
    output_tokens: Annotated[
        Lengths,
        LENGTHS,
        Meta(description="tokens of an answer, likewise (default: 128; of conversations lognormal:338,0.8)"),
    ] = Lengths("", ())
    prefixes: Annotated[
        int, Meta(ge=1, description="number of prefixes, of which each synthetic prompt begins with one")
    ] = 1
    prefix_tokens: Annotated[
        int, Meta(ge=0, description="tokens of such a prefix, which come on top of --input-tokens; 0: none")
    ] = 0
    turns: Annotated[
        Lengths, LENGTHS, Meta(description="turns of a made conversation, a distribution like --input-tokens")
    ] = Lengths("uniform", (1, 6))
    pause_s: Annotated[
        float,
        Meta(
            ge=0,
            description="mean pause of a user before the next turn, in seconds, distributed exponentially",
        ),
    ] = 0.0
    longest: Annotated[
        int,
        Meta(
            ge=0,
            description="leave out requests of a file with more tokens than this, prompt and answer together; 0: none",
        ),
    ] = 0
    seed: Annotated[
        int,
        Meta(
            ge=-1,
            description="seed of prompts, lengths and arrivals: equal seeds give equal prompts, which a server may have cached "
            "from the run before (default: another one in every run, which the result has)",
        ),
    ] = -1


class Arrivals(NamedTuple):
    """When it is sent."""

    rate: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...],
        Meta(
            description="requests (of conversations: first turns) per second, whether or not earlier ones are answered; several for a "
            "sweep (default: a trace has its own times, all else --concurrency)"
        ),
    ] = ()
    concurrency: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(
            description="requests in flight: each is sent when another is answered; several for a sweep; with --rate or a trace's own "
            "times the most at a time (default: 8; with a rate or a trace no limit)"
        ),
    ] = ()
    arrivals: Annotated[
        Literal["poisson", "constant"], Meta(description="intervals of a --rate: random, or all equal")
    ] = "poisson"
    speed: Annotated[float, Meta(gt=0, description="divisor of a trace's own times")] = 1.0


class Target(NamedTuple):
    """Where it is sent, and how."""

    api: Annotated[
        Literal["chat", "completions"], Meta(description="chat completions, or completions of a prompt")
    ] = "chat"
    model: Annotated[str, Meta(description="model (default: the first that the server lists)")] = ""
    tokenizer: Annotated[
        str,
        Meta(
            description="folder of the model, or its tokenizer.json: prompts then have exactly the wanted tokens (default: common "
            "words, as many as the server counts tokens for)"
        ),
    ] = ""
    api_key_file: Annotated[str, Meta(description="file with the API key")] = ""
    ignore_eos: Annotated[
        bool,
        Meta(
            description="ask for answers of exactly the wanted length (`ignore_eos`, which is not part of OpenAI's API: vLLM, SGLang, "
            "TensorRT-LLM and Headwater know it); else they may be shorter"
        ),
    ] = True
    extra_body: Annotated[
        str, Meta(description="JSON object with further fields of every request, as '{\"temperature\": 0}'")
    ] = ""
    timeout_s: Annotated[float, Meta(gt=0, description="seconds after which a request counts as failed")] = (
        600.0
    )


class Output(NamedTuple):
    """What is shown."""

    slo: Annotated[
        Mapping[str, float],
        SLO,
        Meta(
            description="limits of goodput: "
            + ", ".join(f"{name} ({text})" for name, text in LIMITS.items())
            + "; as ttft=500ms,itl=50ms"
        ),
    ] = MappingProxyType({})
    json_file: Annotated[
        str,
        Flag("json"),
        Meta(description="write the result as JSON to this file, with every request"),
    ] = ""
    plot: Annotated[str, Meta(description="draw the result of a sweep to this file (.svg)")] = ""


DEFAULT_LENGTHS: Final = {
    SYNTHETIC: (constant(1_000), constant(128)),
    # The means that the paper on vLLM (SOSP 2023) states for ShareGPT.
    CONVERSATIONS: (Lengths("lognormal", (161, 1.2)), Lengths("lognormal", (338, 0.8))),
}
