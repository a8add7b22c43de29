"""Workloads: which prompts are sent, how long their answers are to be, and when they are due.

Everything is a list of conversations, most of which have one turn. Prompts have a wanted number of tokens, for a model whose tokenizer need
not be known. A prompt is made of words, each from a number: equal numbers are equal text, so prompts begin alike as far as their parts have
equal keys. With the model's tokenizer the words are those that are one token each, after any other. Without it they are common English words,
and two requests that ask for one token find out how many tokens the server counts for them (`Calibration`).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgspec
import numpy as np
from tokenizers import Tokenizer

from headwater.ops.bench.options import CONVERSATIONS, DEFAULT_LENGTHS, SYNTHETIC, Lengths, Traffic
from headwater.ops.bench.trace import Trace, TraceRequest, mix, own_hash, read
from headwater.ops.config.setting import ConfigError

_COMMON = """
a about across after against almost along always among and any are around ask at back bad be because been began below
best between big body both box bring but by came can care case change city class close color come could course cut day
did does door down drive each early east eat enough ever every eye fact fall far fast feel field find fire first five
follow food for found four friend from game get girl go good got green ground grow half hand has he head heard heart
help here high his home horse hour house idea in inch is island just kind king land last late leave left let life
light line little live look low make many map may mean men mile mind moon morning most mountain move music my name
need new next no north note number of often on once only open order our out own paper part people perhaps picture plan
plant point power question rain ran read real red right river rock round rule said saw say sea second seem set several
she short should side simple sing six size sleep small snow some song sound space stand start state step stood stop
street study such sure table talk ten than the them then these they think those thought through to together took top
town true try two under up use very wait want war was watch way week well were what wheel where which white whole why
wind without wood work world write yes yet young
"""

COMMON: Final = tuple(_COMMON.split())
"""Words that most vocabularies have as one token."""

WORDS_MIN: Final = 64
"""Distinct words of one token that a tokenizer must have."""

WORDS_MAX: Final = 4_096

PROBE_WORDS: Final = len(COMMON)
"""Words that the first of two probes has once, and the second twice: as often as prompts have them on average."""

_WORD = re.compile(r"[Ġ▁][a-z]{2,}")
"""A word after a space, as byte-level vocabularies and SentencePiece's write it."""


class Calibration(NamedTuple):
    """How a server counts: `fixed` tokens of a chat template or a beginning, and `per_word` for each word.

    `known` False: the server does not count, so a word is taken for a token.
    """

    per_word: float = 1.0
    fixed: float = 0.0
    known: bool = False


def calibration_of(words: int, once: int, twice: int) -> Calibration:
    """What follows from the tokens of `words` words, and of twice as many; -1 where a server does not count."""
    if once < 1 or twice <= once:
        return Calibration()
    per_word = (twice - once) / words
    return Calibration(per_word, max(0.0, once - per_word * words), known=True)


class Part(NamedTuple):
    """A part of a prompt: `tokens` of text that follows from `key`."""

    key: int
    tokens: int


class Words:
    """Makes text. `tokenizer`: the words are one token each in it."""

    def __init__(self, words: tuple[str, ...] = COMMON, tokenizer: Tokenizer | None = None) -> None:
        self._words = np.array([f" {word}" for word in words], object)
        self.tokenizer = tokenizer
        self.calibration = Calibration()

    def text(self, key: int, words: int) -> str:
        """Return this many words, each after a space. The first ones are the same for any number."""
        with np.errstate(over="ignore"):
            seeds = mix(np.array([key], np.uint64)) + np.arange(words, dtype=np.uint64)
        return "".join(self._words[(mix(seeds) % np.uint64(len(self._words))).astype(np.int64)])

    @property
    def probed(self) -> int:
        """Words of the first probe."""
        return min(PROBE_WORDS, len(self._words))

    def probe(self, times: int) -> str:
        """Return the text of a probe."""
        return "".join(self._words[:PROBE_WORDS]) * times

    def prompt(self, parts: "tuple[Part, ...] | list[Part]") -> str:
        """Return text that the server counts as the parts' tokens, together with its fixed ones.

        The fixed tokens are taken from the last part, since the parts before may be shared. A part has at least one word.
        """
        per_word, fixed, _ = self.calibration
        last = len(parts) - 1
        return "".join(
            self.text(part.key, max(1, round((part.tokens - (fixed if at == last else 0)) / per_word)))
            for at, part in enumerate(parts)
        )

    def tokens_of(self, text: str) -> int:
        """Return the number of tokens of a text: exactly with a tokenizer, else as many as the server would count for as many words."""
        if self.tokenizer is not None:
            return len(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return max(1, round(len(text.split()) * self.calibration.per_word))


def words_of(folder: str) -> Words:
    """The words of a model's tokenizer. Raises `ConfigError` for a folder without one, or one with few such words."""
    path = Path(folder)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    # The library raises this class for a file that is missing, and for one it cannot read.
    except Exception as error:
        raise ConfigError(f"--tokenizer {folder}: {file}: {error}") from error
    candidates = sorted({word[1:] for word in tokenizer.get_vocab() if _WORD.fullmatch(word)})
    before = len(tokenizer.encode(" the", add_special_tokens=False).ids)
    pairs = tokenizer.encode_batch([f" the {word}" for word in candidates], add_special_tokens=False)
    usable = [word for word, pair in zip(candidates, pairs, strict=True) if len(pair.ids) == before + 1]
    if len(usable) < WORDS_MIN:
        raise ConfigError(
            f"--tokenizer {folder}: only {len(usable)} words are one token in it; leave it out, and words are counted by the server"
        )
    step = max(1, len(usable) // WORDS_MAX)
    return Words(tuple(usable[::step][:WORDS_MAX]), tokenizer)


HUMANS: Final = frozenset(("human", "user"))
MODELS: Final = frozenset(("gpt", "chatgpt", "assistant", "bing", "bard"))
"""Who speaks in files of ShareGPT's format."""

NUMBERS: Final = 1 << 48
"""Keys of made prompts begin here, so that none is a block of a trace."""


class Turn(NamedTuple):
    """A message, and the tokens that its answer is to have. `tokens` are those of the message. The pause is before it."""

    text: str
    tokens: int
    output_tokens: int
    pause_s: float = 0.0


class Conversation(NamedTuple):
    """Turns, each of which is sent when the one before is answered. `due_s`: a trace's own time; below 0 there is none."""

    turns: tuple[Turn, ...]
    due_s: float = -1.0


class Workload(NamedTuple):
    """What is sent. `left_out` requests of a file were longer than `longest`."""

    name: str
    conversations: list[Conversation]
    left_out: int = 0

    @property
    def requests(self) -> int:
        """The number of all turns."""
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def timed(self) -> bool:
        """Has it times of its own?"""
        return self.conversations[0].due_s >= 0


WorkloadMaker = Callable[[int], Workload]
"""Makes the workload of a point of a sweep, from its number: other prompts for each, so that none is cached from the point before."""


def workload_maker(traffic: Traffic, seed: int, words: Words) -> WorkloadMaker:
    """Return what makes the workload of each point. Raises `ConfigError` for options that do not fit, and for a file that cannot be read."""
    _check(traffic)
    if traffic.workload in DEFAULT_LENGTHS:
        defaults = DEFAULT_LENGTHS[traffic.workload]
        lengths = (traffic.input_tokens, traffic.output_tokens)
        prompt_lengths, answer = (
            configured if configured.kind else usual
            for configured, usual in zip(lengths, defaults, strict=True)
        )
        make = _conversations if traffic.workload == CONVERSATIONS else _synthetic
        return lambda point: make(traffic, prompt_lengths, answer, Random(f"{seed} {point}"), words)
    path = Path(traffic.workload)
    dialogues = _read_dialogues(path)
    if dialogues is not None:
        return lambda point: _recorded(path.name, dialogues, traffic, seed, point, words)
    trace = read(path)
    return lambda point: _of_trace(trace, traffic, seed, point, words)


_OF: Final = {
    "prefixes": (SYNTHETIC,),
    "prefix_tokens": (SYNTHETIC,),
    "turns": (CONVERSATIONS,),
    "input_tokens": (SYNTHETIC, CONVERSATIONS),
    "output_tokens": (SYNTHETIC, CONVERSATIONS),
}
"""Options that only these workloads have."""


def _check(traffic: Traffic) -> None:
    usual = Traffic()
    for name, workloads in _OF.items():
        if getattr(traffic, name) != getattr(usual, name) and traffic.workload not in workloads:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for --workload {' or '.join(workloads)}: {traffic.workload} has its own"
                if len(workloads) > 1
                else f"--{name.replace('_', '-')} is for --workload {workloads[0]}"
            )
    is_synthetic = traffic.workload in DEFAULT_LENGTHS
    if is_synthetic and traffic.longest:
        raise ConfigError(
            "--longest is for a file: made requests have the lengths of --input-tokens and --output-tokens"
        )
    if is_synthetic and not traffic.requests:
        raise ConfigError("--requests 0 means all of a file: give the number of made requests")
    if traffic.prefixes > 1 and not traffic.prefix_tokens:
        raise ConfigError("--prefixes needs --prefix-tokens, the length of each prefix")


def _synthetic(
    traffic: Traffic, prompt_lengths: Lengths, answer: Lengths, random: Random, words: Words
) -> Workload:
    prefixes = [
        Part(random.getrandbits(62) | NUMBERS, traffic.prefix_tokens) for _ in range(traffic.prefixes)
    ]
    conversations = []
    for _ in range(traffic.requests):
        shared = [random.choice(prefixes)] if traffic.prefix_tokens else []
        unique_part = Part(random.getrandbits(62) | NUMBERS, prompt_lengths.draw(random))
        text = words.prompt([*shared, unique_part])
        tokens = unique_part.tokens + traffic.prefix_tokens
        conversations.append(Conversation((Turn(text, tokens, answer.draw(random)),)))
    return Workload(SYNTHETIC, conversations)


def _conversations(
    traffic: Traffic, prompt_lengths: Lengths, answer: Lengths, random: Random, words: Words
) -> Workload:
    conversations, remaining = [], traffic.requests
    while remaining:
        turns = []
        for number in range(min(remaining, traffic.turns.draw(random))):
            part = Part(random.getrandbits(62) | NUMBERS, prompt_lengths.draw(random))
            turns.append(
                Turn(words.prompt([part]), part.tokens, answer.draw(random), _pause(traffic, random, number))
            )
        remaining -= len(turns)
        conversations.append(Conversation(tuple(turns)))
    return Workload(CONVERSATIONS, conversations)


def _pause(traffic: Traffic, random: Random, turn: int) -> float:
    return random.expovariate(1 / traffic.pause_s) if turn and traffic.pause_s else 0.0


# ShareGPT's format: a list of objects with `conversations`, a list of objects with `from` and `value`.


class _Message(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Dialogue(msgspec.Struct):
    conversations: list[_Message]
    id: Any = None


def _read_dialogues(path: Path) -> list[list[tuple[str, str]]] | None:
    """(Message, answer) by turn and conversation; None for a file that is no list. Raises `ConfigError` if it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        if "." not in path.name and path.parent == Path():
            raise ConfigError(
                f"--workload {path}: there is no such file, and workloads are {', '.join(DEFAULT_LENGTHS)}"
            ) from error
        raise ConfigError(f"--workload {path}: {error.strerror}") from error
    if not data[:4096].lstrip().startswith(b"["):
        return None
    try:
        dialogues = msgspec.json.decode(data, type=list[_Dialogue])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}; expected ShareGPT's format") from error
    parsed = [turns for dialogue in dialogues if (turns := list(_turns(dialogue.conversations)))]
    if not parsed:
        raise ConfigError(f"{path}: has no conversation in which a model answers a human")
    return parsed


def _turns(messages: Sequence[_Message]) -> Iterator[tuple[str, str]]:
    """The turns of a conversation, up to the first that is not a human's with an answer."""
    start = 1 if messages and messages[0].speaker == "system" else 0
    for question, answer in zip(messages[start::2], messages[start + 1 :: 2], strict=False):
        if (
            question.speaker not in HUMANS
            or answer.speaker not in MODELS
            or not (question.value and answer.value)
        ):
            return
        yield question.value, answer.value


def _recorded(
    name: str, dialogues: list[list[tuple[str, str]]], traffic: Traffic, seed: int, point: int, words: Words
) -> Workload:
    random = Random(f"{seed} {point}")
    conversations: list[Conversation] = []
    remaining, left_out = traffic.requests or sum(map(len, dialogues)), 0
    for dialogue in dialogues:
        turns: list[Turn] = []
        length = 0
        for number, (question, answer) in enumerate(dialogue[:remaining]):
            # Later points have other beginnings, so that no answer comes from the cache of an earlier one.
            text = f"({point + 1}) {question}" if point and not number else question
            tokens, output = words.tokens_of(text), words.tokens_of(answer)
            length += tokens + output
            if traffic.longest and length > traffic.longest:
                left_out += len(dialogue) - number
                break
            turns.append(Turn(text, tokens, output, _pause(traffic, random, number)))
        remaining -= len(turns)
        if turns:
            conversations.append(Conversation(tuple(turns)))
        if not remaining:
            break
    return _whole(Workload(name, conversations, left_out), traffic)


def _of_trace(trace: Trace, traffic: Traffic, seed: int, point: int, words: Words) -> Workload:
    """The requests of a trace. Blocks with equal ids have equal text, within a point."""
    conversations, left_out = [], 0
    salt = own_hash(seed, point)
    for request in trace.first(traffic.requests).requests:
        if traffic.longest and request.prompt_tokens + request.output_tokens > traffic.longest:
            left_out += 1
            continue
        turn = Turn(words.prompt(_parts(request, salt)), request.prompt_tokens, request.output_tokens)
        conversations.append(Conversation((turn,), request.arrival_ns / 1e9))
    return _whole(Workload(trace.name, conversations, left_out), traffic)


def _parts(request: TraceRequest, salt: int) -> list[Part]:
    """A part for each block; the last may be partial, and a trace may leave it out."""
    lengths = [request.unit] * (request.prompt_tokens // request.unit)
    if request.prompt_tokens % request.unit:
        lengths.append(request.prompt_tokens % request.unit)
    ids = [*request.ids, *(own_hash(crc32(request.name.encode()), 0) for _ in lengths[len(request.ids) :])]
    return [Part(number ^ salt, tokens) for number, tokens in zip(ids, lengths, strict=True)]


def _whole(workload: Workload, traffic: Traffic) -> Workload:
    if not workload.conversations:
        raise ConfigError(f"--longest {traffic.longest}: no request of {workload.name} is that short")
    return workload
