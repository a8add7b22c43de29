"""Classes of synthetic traffic, each from one seed: which prompts arrive in which order, and how long their answers are.

Arrival times are in units of the mean time between two requests; `zoo.load` scales them to a fleet. The classes
differ in what is shared (sessions, documents, system prompts, nothing), in lengths, and in the pattern of arrivals.
"""

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Final, NamedTuple

from tests.bench.zoo.prompts import BlockIds, TextSegment, length_of

PROMPT_MAX = 120_000
"""Tokens: the conversation trace's longest prompt has 126,195."""


class Arrival(NamedTuple):
    """One request. `at` is in units of the mean time between requests."""

    at: float
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    session: str = ""
    tenant: str = ""


class TrafficSource(NamedTuple):
    """What a generator draws from: random numbers, and the ids of the blocks it makes."""

    draw: Random
    blocks: BlockIds

    def lognormal(self, median: float, spread: float, high: int = PROMPT_MAX) -> int:
        """A length with this median; `spread` is the standard deviation of its logarithm."""
        return max(1, min(high, round(self.draw.lognormvariate(math.log(median), spread))))

    def arrival(
        self, at: float, prompt: list[TextSegment], output: int, session: str = "", tenant: str = ""
    ) -> Arrival:
        """A request for `prompt`."""
        return Arrival(at, length_of(prompt), output, self.blocks.ids_of(prompt), session, tenant)


Generator = Callable[[TrafficSource, int], list[Arrival]]
"""Makes `count` requests from a source; the caller sorts them."""


def zipf_weights(count: int, exponent: float) -> list[float]:
    """The popularity of `count` things, most popular first."""
    return [1 / (rank + 1) ** exponent for rank in range(count)]


def _poisson(source: TrafficSource, count: int, start: float = 0.0, rate: float = 1.0) -> Iterator[float]:
    at = start
    for _ in range(count):
        at += source.draw.expovariate(rate)
        yield at


class _Dialogues(NamedTuple):
    """Sessions that grow by a question and an answer a turn. Lengths are (median, spread) in tokens."""

    turns: tuple[int, int]
    system_prompts: list[TextSegment]
    question: tuple[float, float]
    answer: tuple[float, float]
    think: float
    """The mean pause between turns, in units of the mean time between requests, per `count` of the class."""

    def arrivals(self, source: TrafficSource, count: int) -> list[Arrival]:
        """Sessions begin at random over the whole time, so that about as many are open at any moment."""
        mean_turns = sum(self.turns) / 2
        sessions = max(1, round(count / mean_turns))
        span = float(count)
        found: list[Arrival] = []
        for number in range(sessions):
            at = source.draw.uniform(-self.think * mean_turns / 2, span)
            prompt = [source.draw.choice(self.system_prompts)] if self.system_prompts else []
            for _ in range(source.draw.randint(*self.turns)):
                prompt.append(source.blocks.new_segment(source.lognormal(*self.question)))
                output = source.lognormal(*self.answer, 2_000)
                if length_of(prompt) > PROMPT_MAX:
                    break
                if at >= 0:
                    found.append(source.arrival(at, list(prompt), output, f"s{number}"))
                prompt.append(source.blocks.new_segment(output))
                at += source.draw.expovariate(1 / self.think)
        found.sort()
        return found[:count]


def agents(source: TrafficSource, count: int) -> list[Arrival]:
    """Tool-using agents: long system prompts that many share, 4 to 18 quick turns of tool output, short answers."""
    systems = [source.blocks.new_segment(source.lognormal(6_000, 0.4)) for _ in range(8)]
    dialogues = _Dialogues((4, 18), systems, (900, 0.9), (160, 0.7), think=count / 60)
    return dialogues.arrivals(source, count)


def chat(source: TrafficSource, count: int) -> list[Arrival]:
    """People who chat: one short system prompt, 1 to 8 turns with long pauses, answers of some hundred tokens."""
    systems = [source.blocks.new_segment(700)]
    return _Dialogues((1, 8), systems, (250, 1.0), (350, 0.7), think=count / 15).arrivals(source, count)


def _prefixed(
    source: TrafficSource,
    count: int,
    prefixes: list[TextSegment],
    exponent: float,
    prompt: tuple[float, float],
    output: tuple[float, float],
) -> list[Arrival]:
    """Prompts that begin with one of the prefixes, by Zipf's law. Lengths are the median and the deviation of their logarithm."""
    popularity = zipf_weights(len(prefixes), exponent)
    return [
        source.arrival(
            at,
            [
                source.draw.choices(prefixes, popularity)[0],
                source.blocks.new_segment(source.lognormal(*prompt)),
            ],
            source.lognormal(*output, 2_000),
        )
        for at in _poisson(source, count)
    ]


def _unshared(
    source: TrafficSource, count: int, prompt: tuple[float, float], output: tuple[float, float]
) -> list[Arrival]:
    """Prompts that have nothing in common. Lengths as in `_prefixed`."""
    return [
        source.arrival(
            at, [source.blocks.new_segment(source.lognormal(*prompt))], source.lognormal(*output, 2_000)
        )
        for at in _poisson(source, count)
    ]


def documents(source: TrafficSource, count: int) -> list[Arrival]:
    """Short questions about one of 300 long documents, with popularity by Zipf's law."""
    shelf = [source.blocks.new_segment(source.lognormal(12_000, 0.6)) for _ in range(300)]
    return _prefixed(source, count, shelf, 1.0, (150, 0.6), (220, 0.7))


def hot(source: TrafficSource, count: int) -> list[Arrival]:
    """Bursts, of which 85 % share one of three prefixes of 16,384 tokens."""
    prefixes = [source.blocks.new_segment(16_384) for _ in range(3)]
    found: list[Arrival] = []
    at = 0.0
    while len(found) < count:
        size = source.draw.randint(4, 24)
        at += source.draw.expovariate(1 / size)
        for _ in range(size):
            shared = [source.draw.choice(prefixes)] if source.draw.random() < 0.85 else []
            own = source.blocks.new_segment(source.lognormal(600 if shared else 8_000, 0.7))
            found.append(source.arrival(at, [*shared, own], source.lognormal(200, 0.6, 2_000)))
    return found[:count]


def cold(source: TrafficSource, count: int) -> list[Arrival]:
    """Nothing is shared; prompts and answers are heavy-tailed."""
    return _unshared(source, count, (3_000, 1.3), (250, 1.0))


def tenants(source: TrafficSource, count: int) -> list[Arrival]:
    """Forty tenants, each with a system prompt and examples of its own; a few send most of the requests, in bursts."""
    population = [f"t{number}" for number in range(40)]
    prefix = {
        name: [
            source.blocks.new_segment(source.lognormal(2_500, 0.5)),
            source.blocks.new_segment(source.lognormal(2_000, 0.8)),
        ]
        for name in population
    }
    popularity = zipf_weights(len(population), 1.1)
    found: list[Arrival] = []
    at = 0.0
    while len(found) < count:
        size = 1 + int(source.draw.expovariate(0.4))
        at += source.draw.expovariate(1 / size)
        name = source.draw.choices(population, popularity)[0]
        for _ in range(size):
            own = source.blocks.new_segment(source.lognormal(800, 0.9))
            output = source.lognormal(180, 0.8, 2_000)
            found.append(source.arrival(at, [*prefix[name], own], output, tenant=name))
    return found[:count]


def code(source: TrafficSource, count: int) -> list[Arrival]:
    """Code completion: short, frequent; a file's text grows while its author types, answers are a few tokens."""
    found: list[Arrival] = []
    while len(found) < count:
        at = source.draw.uniform(0, count)
        prompt = [source.blocks.new_segment(source.lognormal(1_800, 0.8, 12_000))]
        for _ in range(source.draw.randint(5, 40)):
            prompt.append(source.blocks.new_segment(source.lognormal(40, 0.8)))
            found.append(
                source.arrival(at, list(prompt), source.lognormal(24, 0.6, 200), session=f"f{prompt[0].key}")
            )
            at += source.draw.expovariate(200 / count)
    found = [one for one in found if one.at < count]
    found.sort()
    return found[:count]


def long_context(source: TrafficSource, count: int) -> list[Arrival]:
    """Prompts of 20 to 120 thousand tokens, a third of them a second question about the same text."""
    found: list[Arrival] = []
    at = 0.0
    while len(found) < count:
        at += source.draw.expovariate(0.75)
        text = source.blocks.new_segment(source.lognormal(40_000, 0.6))
        later = at
        for _ in range(1 if source.draw.random() < 0.67 else 2):
            question = source.blocks.new_segment(source.lognormal(200, 0.5))
            found.append(source.arrival(later, [text, question], source.lognormal(400, 0.7, 2_000)))
            later += source.draw.expovariate(30 / count)
    found.sort()
    return found[:count]


def shifting(source: TrafficSource, count: int) -> list[Arrival]:
    """Two hundred prefixes of which ten are popular at a time; which ones changes eight times."""
    prefixes = [source.blocks.new_segment(source.lognormal(5_000, 0.5)) for _ in range(200)]
    found: list[Arrival] = []
    for number, at in enumerate(_poisson(source, count)):
        first = (number * 8 // count) * 25
        chosen = (
            prefixes[(first + source.draw.randrange(10)) % 200]
            if source.draw.random() < 0.8
            else source.draw.choice(prefixes)
        )
        own = source.blocks.new_segment(source.lognormal(400, 0.8))
        found.append(source.arrival(at, [chosen, own], source.lognormal(250, 0.7, 2_000)))
    return found


def single_turn(source: TrafficSource, count: int) -> list[Arrival]:
    """Short prompts without anything in common and long answers: nearly all the work is decoding."""
    return _unshared(source, count, (500, 0.8), (700, 0.6))


def slow_worker(source: TrafficSource, count: int) -> list[Arrival]:
    """The traffic of `agents`, on a fleet of which one worker turns slow."""
    return agents(source, count)


def two_speeds(source: TrafficSource, count: int) -> list[Arrival]:
    """The traffic of `documents` and of `single_turn` in equal parts, on workers of two speeds."""
    half = count // 2
    found = [*documents(source, count - half), *single_turn(source, half)]
    # Both have a mean time of 1 between their requests, and half as many of them as the whole.
    return sorted(one._replace(at=2 * one.at) for one in found)


def prefill_decode(source: TrafficSource, count: int) -> list[Arrival]:
    """Prompts of which about half is one of 60 prefixes, and answers of some hundred tokens, on two pools of workers."""
    prefixes = [source.blocks.new_segment(source.lognormal(4_000, 0.5)) for _ in range(60)]
    return _prefixed(source, count, prefixes, 0.9, (3_000, 0.9), (350, 0.7))


CLASSES: Final[dict[str, Generator]] = {
    generator.__name__: generator
    for generator in (
        agents,
        chat,
        code,
        cold,
        documents,
        hot,
        long_context,
        prefill_decode,
        shifting,
        single_turn,
        slow_worker,
        tenants,
        two_speeds,
    )
}
"""Traffic classes by name. `zoo.fleets` says which of them have workers that are not all alike."""


def generate(name: str, count: int, seed: int) -> list[Arrival]:
    """`count` requests of a class, by arrival."""
    source = TrafficSource(Random(f"{name}/{seed}"), BlockIds())
    found = sorted(CLASSES[name](source, count))
    begin = found[0].at
    return [one._replace(at=one.at - begin) for one in found]
