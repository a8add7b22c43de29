"""A body is what was sent, whatever parts it arrives in, and counts as in flight until it was handled."""

from typing import Any

import pytest

from headwater.actors.http.asgi import ClientGone, Receive
from headwater.actors.http.body import LARGE_BYTES, UNCOUNTED_BYTES, Bodies
from headwater.actors.http.errors import ApiError
from headwater.actors.limits import BodyLimits

LARGE = [bytes([number]) * (UNCOUNTED_BYTES - 1) for number in range(4 * LARGE_BYTES // UNCOUNTED_BYTES + 9)]
"""Parts of some megabytes, no two alike."""


def receiver(parts: list[bytes], *, whole: bool = True) -> Receive:
    """ASGI's `receive` for a body in these parts; one that is not `whole` ends with a disconnect."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": True} for part in parts
    ]
    if whole:
        messages[-1]["more_body"] = False
    else:
        messages.append({"type": "http.disconnect"})
    pending = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(pending)

    return receive


@pytest.mark.parametrize("parts", [[b""], [b"{}"], [b"a", b"", b"bc", b"d"], LARGE])
async def test_parts_become_one_body_in_their_order(parts: list[bytes]) -> None:
    """One part, several, and more than are joined on the event loop."""
    bodies = Bodies()
    size = sum(map(len, parts))
    async with bodies.read({"headers": []}, receiver(list(parts))) as body:
        assert body == b"".join(parts)
        assert bodies.in_flight_bytes == (size if size > UNCOUNTED_BYTES else 0)
    assert bodies.in_flight_bytes == 0


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"GZIP, identity"])
async def test_a_compressed_body_is_rejected_by_name(encoding: bytes) -> None:
    """It is not read as JSON; `identity` is no compression."""
    scope = {"headers": [(b"content-encoding", encoding)]}
    with pytest.raises(ApiError, match="send the body uncompressed") as raised:
        async with Bodies().read(scope, receiver([b"{}"])):
            pytest.fail("there is no body")
    assert raised.value.status == 415
    async with Bodies().read({"headers": [(b"content-encoding", b"identity")]}, receiver([b"{}"])) as body:
        assert body == b"{}"


async def test_an_abandoned_body_is_in_flight_no_more() -> None:
    """The client disconnects before the end."""
    bodies = Bodies()
    with pytest.raises(ClientGone):
        async with bodies.read({"headers": []}, receiver(LARGE, whole=False)):
            pytest.fail("there is no body")
    assert bodies.in_flight_bytes == 0


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        (BodyLimits(bytes_max=UNCOUNTED_BYTES), 413),
        (BodyLimits(bytes_max=2**30, in_flight_bytes_max=2 * UNCOUNTED_BYTES), 503),
    ],
)
async def test_a_body_past_a_bound_is_refused(limits: BodyLimits, status: int) -> None:
    """Of one body, and of all."""
    bodies = Bodies(limits)
    with pytest.raises(ApiError) as refused:
        async with bodies.read({"headers": []}, receiver(LARGE)):
            pytest.fail("there is no body")
    assert refused.value.status == status
    assert bodies.in_flight_bytes == 0
