"""`headwater switch`: lines that mean nothing are refused before anything is asked of a fleet."""

import pytest

from headwater.ops.commands.application import parse
from headwater.ops.config.setting import ConfigError


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--to", "a", "--to-policy", "kv"), "give one of --to, --to-policy, --resume and --remove"),
        (("--resume", "--remove"), "give one of --to"),
        (
            ("--canary", "5"),
            "--canary, --steps, --hold, --gate, --samples and --detach are for --to REVISION",
        ),
        (("--resume", "--hold", "5m"), "are for --to REVISION"),
        (("--samples", "3"), "are for --to REVISION"),
        (("--to", "a", "--url", "http://h"), "are where --prompts FILE is sent"),
        (("--to", "a", "--json"), "--json is for showing the shares"),
        (("--to", "a", "--gate", "answers=1"), "the gate answers and --prompts FILE need each other"),
        (("--to", "a", "--prompts", "f"), "the gate answers and --prompts FILE need each other"),
        (("--to-policy", "kv", "--gate", "answers=1", "--prompts", "f"), "a policy changes no answers"),
        (("--to", "a", "--gate", "speed=1"), "there is no gate 'speed'; gates are: errors"),
        (("--to", "a", "--canary", "5", "--steps", "5,100"), "give one of them"),
        (("--to", "a", "--steps", "5,4,100"), "write rising percentages"),
        (("--to", "a", "--hold", "soon"), "--hold soon: write a time"),
    ],
)
def test_lines_that_mean_nothing(words: tuple[str, ...], reason: str) -> None:
    """Each error names the flag and what to write."""
    bound, _ = parse(["switch", *words])
    with pytest.raises(ConfigError) as error:
        bound.run()
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "words", [("--canary", "0", "--to", "a"), ("--canary", "101", "--to", "a"), ("--samples", "0")]
)
def test_numbers_out_of_range(words: tuple[str, ...]) -> None:
    """The command line itself refuses them."""
    with pytest.raises(ConfigError):
        parse(["switch", *words])
