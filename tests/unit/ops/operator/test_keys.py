"""`headwater keys`: what a wanted key becomes, and what is refused."""

from typing import Any

import msgspec
import pytest

from headwater.ops.config.setting import ConfigError
from headwater.ops.operator import keys
from headwater.ops.operator.keys import (
    KeyChanges,
    WantedKey,
    model_limits_of,
    new_key,
    seconds_of,
    seconds_or_never,
    with_changes,
    words_of,
    words_or_none,
)
from headwater.schemas.tables import Scopes, UsageLimits


def test_a_key_has_what_was_asked_for() -> None:
    wanted = WantedKey(
        "acme", "ci", ("m",), ("chat",), ("tier",), 60, UsageLimits(1, 2, 3, 4), {"m": UsageLimits(5)}, True
    )
    key, secret = new_key(wanted, 1000)
    assert (key.tenant, key.name, key.created_s, key.expires_s) == ("acme", "ci", 1000, 1060)
    assert (key.scopes.models, key.scopes.endpoints, key.scopes.permissions) == (("m",), ("chat",), ("tier",))
    assert (key.limits, key.model_limits) == (UsageLimits(1, 2, 3, 4), {"m": UsageLimits(5)})
    assert key.cache_sharing
    assert len(secret) == 64
    assert new_key(wanted, 1000)[0].id != key.id


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"tenant": ""}, "--tenant"),
        ({"tenant": "a b"}, "--tenant"),
        ({"tenant": "ü"}, "--tenant"),
        ({"tenant": "a" * 129}, "--tenant"),
        ({"name": "a\nb"}, "--name"),
        ({"endpoints": ("chats",)}, "--endpoints"),
        ({"permissions": ("root",)}, "--allow"),
    ],
)
def test_each_option_is_checked(changes: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        new_key(WantedKey(**{"tenant": "acme", **changes}), 0)


@pytest.mark.parametrize(("text", "seconds"), [("90d", 7_776_000), ("12h", 43_200), ("5m", 300), ("0s", 0)])
def test_durations(text: str, seconds: int) -> None:
    assert seconds_of(text, "--expires") == seconds


@pytest.mark.parametrize("text", ["", "90", "d", "-1d", "1.5h", "1w", "1 d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--expires"):
        seconds_of(text, "--expires")


def test_limits_of_models_add_up() -> None:
    words = words_of(
        ["org/m:v1:requests_per_minute=10,n:tokens_per_minute=5", "org/m:v1:concurrent_requests=2"]
    )
    assert model_limits_of(words) == {
        "org/m:v1": UsageLimits(requests_per_minute=10, concurrent_requests=2),
        "n": UsageLimits(tokens_per_minute=5),
    }


@pytest.mark.parametrize(
    "word", ["m", "m:requests", "m:requests_per_minute", "m:requests_per_minute=-1", ":x=1"]
)
def test_what_is_no_limit_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--model-limits"):
        model_limits_of([word])


def test_only_what_is_named_changes() -> None:
    wanted = WantedKey(
        "acme", "ci", ("m",), ("chat",), ("tier",), 60, UsageLimits(1, 2, 3, 4), {"m": UsageLimits(5)}, True
    )
    key, _ = new_key(wanted, 1000)
    assert with_changes(key, KeyChanges(), 5000) == key
    assert key.tenant == "acme"
    assert len(key.digests) == 1
    for changes, field, value in (
        (KeyChanges(name="cd"), "name", "cd"),
        (KeyChanges(expires_in_s=60), "expires_s", 5060),
        (KeyChanges(expires_in_s=0), "expires_s", 0),
        (KeyChanges(limits={"tokens_per_minute": 0}), "limits", UsageLimits(1, 0, 3, 4)),
        (KeyChanges(model_limits={}), "model_limits", {}),
        (KeyChanges(cache_sharing=False), "cache_sharing", False),
        (KeyChanges(models=("a", "b")), "scopes", Scopes(("a", "b"), ("chat",), ("tier",))),
        (KeyChanges(endpoints=("*",)), "scopes", Scopes(("m",), ("*",), ("tier",))),
        (KeyChanges(permissions=()), "scopes", Scopes(("m",), ("chat",), ())),
    ):
        changed = with_changes(key, changes, 5000)
        assert changed == msgspec.structs.replace(key, **{field: value})
        assert changed != key


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        (KeyChanges(name="a b"), "--name"),
        (KeyChanges(endpoints=("chats",)), "--endpoints"),
        (KeyChanges(permissions=("root",)), "--allow"),
    ],
)
def test_each_change_is_checked(changes: KeyChanges, option: str) -> None:
    key, _ = new_key(WantedKey("acme"), 0)
    with pytest.raises(ConfigError, match=option):
        with_changes(key, changes, 0)


def test_options_that_are_missing_and_options_that_clear() -> None:
    assert words_or_none(None) is None
    assert words_or_none(["none"]) == ()
    assert words_or_none(["a,b", "c"]) == ("a", "b", "c")
    assert seconds_or_never(None, "--expires") is None
    assert seconds_or_never("never", "--expires") == 0
    assert seconds_or_never("1m", "--expires") == 60


def test_an_id_may_have_the_prefix_and_a_whole_key_is_not_repeated() -> None:
    assert keys._id_of("hw-0123456789ab") == keys._id_of("0123456789ab") == "0123456789ab"
    whole = "hw-0123456789ab-" + "5" * 64
    with pytest.raises(ConfigError) as caught:
        keys._id_of(whole)
    assert "5555" not in str(caught.value)
