"""Workloads: lengths, what prompts share, and files."""

import json
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headwater.ops.bench.options import Arrivals, Lengths, Traffic, read_lengths
from headwater.ops.bench.serve import paces_of
from headwater.ops.bench.trace import Trace, TraceRequest, write
from headwater.ops.bench.workload import (
    COMMON,
    Calibration,
    Part,
    Words,
    Workload,
    calibration_of,
    words_of,
    workload_maker,
)
from headwater.ops.config.setting import ConfigError


def made(traffic: Traffic, seed: int = 1, point: int = 0, words: Words | None = None) -> Workload:
    return workload_maker(traffic, seed, words or Words())(point)


def texts(workload: Workload) -> list[list[str]]:
    return [[turn.text for turn in one.turns] for one in workload.conversations]


def common(one: str, other: str) -> int:
    """Words that two texts begin with."""
    pairs = list(zip(one.split(), other.split(), strict=False))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))


@pytest.mark.parametrize("text", ["5", "uniform:3,9", "normal:100,10", "lognormal:161,1.2"])
def test_a_distribution_is_written_as_it_was_read(text: str) -> None:
    assert str(read_lengths(text)) == text


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-1", "nan", "uniform:3", "uniform:9,3", "zipf:1,2", "normal:5,-1", "1,2"]
)
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"none of|at least|less than"):
        read_lengths(text)


def test_distributions_have_their_means() -> None:
    random = Random(3)
    for text, mean in (("lognormal:161,1.2", 161), ("normal:100,10", 100), ("uniform:50,150", 100), ("7", 7)):
        lengths = read_lengths(text)
        drawn = [lengths.draw(random) for _ in range(20_000)]
        assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.05)
        assert min(drawn) >= 1


def test_prompts_follow_from_seed_and_point() -> None:
    traffic = Traffic(requests=5, prefixes=2, prefix_tokens=50)
    assert texts(made(traffic)) == texts(made(traffic))
    assert texts(made(traffic)) != texts(made(traffic, seed=2))
    # Nothing of a point is cached from the one before.
    first, second = (texts(made(traffic, point=point)) for point in (0, 1))
    assert max(common(a[0], b[0]) for a in first for b in second) < 10


def test_prompts_have_one_of_the_prefixes() -> None:
    found = texts(made(Traffic(requests=30, prefixes=3, prefix_tokens=50, input_tokens=read_lengths("20"))))
    beginnings = {" ".join(text.split()[:50]) for (text,) in found}
    assert len(beginnings) == 3
    assert {len(text.split()) for (text,) in found} == {70}


def test_words_are_as_many_as_the_server_counts_tokens_for() -> None:
    """Fixed tokens are taken from the last part: those before may be shared."""
    words = Words()
    words.calibration = calibration_of(256, 532, 1044)
    assert words.calibration == Calibration(2.0, 20.0, True)
    shared, prompt = words.prompt([Part(1, 100)] * 2), words.prompt([Part(1, 100), Part(2, 120)])
    assert common(shared, prompt) >= 40
    assert len(prompt.split()) == 50 + 50
    assert calibration_of(256, -1, -1) == Calibration()
    assert len(set(COMMON)) == len(COMMON)


def test_prompts_share_what_the_ids_of_a_trace_do(tmp_path: Path) -> None:
    ids = [(1, 2, 3), (1, 2, 4), (5,), (1,)]
    lengths = [1300, 1500, 100, 512]
    requests = tuple(
        TraceRequest(f"r{i}", i * 10**9, tokens, 5, hashes)
        for i, (tokens, hashes) in enumerate(zip(lengths, ids, strict=True))
    )
    write(tmp_path / "trace.jsonl", Trace("t", requests))
    found = made(Traffic(workload=str(tmp_path / "trace.jsonl"), longest=1400))
    assert (found.left_out, [one.due_s for one in found.conversations]) == (1, [0, 2, 3])
    one, other, last = (text for (text,) in texts(found))
    assert [len(text.split()) for text in (one, other, last)] == [1300, 100, 512]
    assert (common(one, last), common(one, other) < 5) == (512, True)
    assert [turn.output_tokens for (turn,) in (one.turns for one in found.conversations)] == [5, 5, 5]
    # The next point of a sweep shares as much, and nothing with this one.
    again = made(Traffic(workload=str(tmp_path / "trace.jsonl"), longest=1400), point=1)
    first, _, third = (text for (text,) in texts(again))
    assert (common(first, third), common(first, one) < 5) == (512, True)


def test_a_partial_block_that_a_trace_leaves_out_is_of_one_request(tmp_path: Path) -> None:
    lines = [{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}] * 2
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    one, other = (text for (text,) in texts(made(Traffic(workload=str(tmp_path / "trace.jsonl")))))
    assert 512 <= common(one, other) < 530


def test_sharegpt(tmp_path: Path) -> None:
    """Turns alternate; what follows a message of someone else is left out."""
    dialogues = [
        {"id": "a", "conversations": [{"from": "gpt", "value": "no question"}]},
        {
            "id": "b",
            "conversations": [
                {"from": "system", "value": "be kind"},
                {"from": "human", "value": "one two"},
                {"from": "gpt", "value": "three four five"},
                {"from": "human", "value": "six"},
                {"from": "gpt", "value": "seven"},
                {"from": "human", "value": "unanswered"},
            ],
        },
        {"id": "c", "conversations": [{"from": "user", "value": "x"}, {"from": "assistant", "value": "y"}]},
    ]
    file = tmp_path / "share.json"
    file.write_text(json.dumps(dialogues))
    found = made(Traffic(workload=str(file), requests=0))
    assert texts(found) == [["one two", "six"], ["x"]]
    assert [turn.output_tokens for turn in found.conversations[0].turns] == [3, 1]
    assert (found.requests, found.timed) == (3, False)
    # The next point does not begin as the first.
    assert texts(made(Traffic(workload=str(file), requests=1), point=1)) == [["(2) one two"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "no conversation"),
        ('[{"conversations": [{"from": "human"}]}]', "ShareGPT's format"),
        ('{"a": 1}', "line 1"),
        ("", "contains no request"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        made(Traffic(workload=str(file)))


@pytest.mark.parametrize(
    ("traffic", "message"),
    [
        (Traffic(turns=read_lengths("3")), "--turns is for --workload conversations"),
        (Traffic(workload="conversations", prefix_tokens=5), "--prefix-tokens is for --workload synthetic"),
        (Traffic(workload="missing"), "no such file, and workloads are"),
        (Traffic(workload="missing.jsonl"), "No such file"),
        (Traffic(workload="x.jsonl", input_tokens=Lengths("constant", (5,))), "--input-tokens is for"),
        (Traffic(prefixes=2), "--prefixes needs"),
        (Traffic(longest=5), "--longest is for a file"),
        (Traffic(requests=0), "--requests 0"),
    ],
)
def test_options_without_an_effect_are_refused(traffic: Traffic, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(traffic)


def test_conversations_have_turns_and_pauses() -> None:
    found = made(Traffic(workload="conversations", requests=50, turns=read_lengths("4"), pause_s=2.0))
    assert found.requests == 50
    assert [len(one.turns) for one in found.conversations] == [4] * 12 + [2]
    assert all(one.turns[0].pause_s == 0 and one.turns[1].pause_s > 0 for one in found.conversations)


def test_a_sweep_has_every_rate_with_every_concurrency() -> None:
    workload = made(Traffic(requests=1))
    assert [(pace.rate, pace.at_once) for pace in paces_of(Arrivals(), workload)] == [(0, 8)]
    assert [pace.at_once for pace in paces_of(Arrivals(concurrency=(1, 4)), workload)] == [1, 4]
    assert [(p.rate, p.at_once, p.open) for p in paces_of(Arrivals(rate=(1, 2)), workload)] == [
        (1, 0, True),
        (2, 0, True),
    ]
    with pytest.raises(ConfigError, match="--speed is for"):
        paces_of(Arrivals(speed=2), workload)
    with pytest.raises(ConfigError, match="--arrivals is for"):
        paces_of(Arrivals(arrivals="constant"), workload)


def _tokenizer(folder: Path, words: int) -> None:
    """A byte-level vocabulary in which `words` words are one token each after a space, and all else is bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: at for at, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for number in range(words):
        text = "Ġ" + chr(97 + number // 26) + chr(97 + number % 26) + "x"
        for end in range(2, len(text) + 1):
            if text[:end] not in vocabulary:
                vocabulary[text[:end]] = len(vocabulary)
                merges.append((text[: end - 1], text[end - 1]))
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def test_with_a_tokenizer_prompts_have_exactly_the_wanted_tokens(tmp_path: Path) -> None:
    _tokenizer(tmp_path, 100)
    words = words_of(str(tmp_path))
    found = made(Traffic(requests=5, input_tokens=read_lengths("uniform:50,150")), words=words)
    for one in found.conversations:
        turn = one.turns[0]
        assert words.tokens_of(turn.text) == turn.tokens


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.json"):
        words_of(str(tmp_path))
    _tokenizer(tmp_path, 10)
    with pytest.raises(ConfigError, match="one token in it"):
        words_of(str(tmp_path))
