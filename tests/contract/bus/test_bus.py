"""The `Bus` contract on publishing: in order, one at a time, shared by queue groups."""

import asyncio

from headwater.actors.runtime.ports import Message
from tests.support.ports.buses import BusCase, keep
from tests.support.ports.waiting import eventually


async def test_messages_arrive_once_and_in_order(bus_case: BusCase, unique: str) -> None:
    """Of one publisher, for each subscriber."""
    got: list[list[Message]] = [[], [], []]
    for number, bus in enumerate((bus_case.bus, bus_case.other, bus_case.other)):
        await bus.subscribe(f"{unique}.x", keep(got[number]))
    await bus_case.settle()
    for number in range(2_000):
        await bus_case.other.publish(f"{unique}.x", str(number).encode())
    await eventually(lambda: all(len(messages) >= 2_000 for messages in got))
    expected = [Message(f"{unique}.x", str(number).encode(), "") for number in range(2_000)]
    assert got == [expected] * 3


async def test_publishing_to_nobody_is_fine(bus_case: BusCase, unique: str) -> None:
    """Send and forget."""
    await bus_case.bus.publish(f"{unique}.nobody", b"x")


async def test_large_messages_pass(bus_case: BusCase, unique: str) -> None:
    """A prompt of a million tokens is 4 MiB."""
    got: list[Message] = []
    await bus_case.other.subscribe(unique, keep(got))
    await bus_case.settle()
    await bus_case.bus.publish(unique, bytes(4 * 1024 * 1024))
    await eventually(lambda: bool(got))
    assert got[0].data == bytes(4 * 1024 * 1024)


async def test_wildcards_match_tokens(bus_case: BusCase, unique: str) -> None:
    """'*' stands for one token, '>' for one or more at the end."""
    patterns = {
        "a.b": ["a.b"],
        "*.b": ["a.b", "c.b"],
        "a.*": ["a.b"],
        "a.>": ["a.b", "a.b.c"],
        ">": ["a.b", "a.b.c", "c.b", "a"],
        "*.*.c": ["a.b.c"],
    }
    got: dict[str, list[Message]] = {pattern: [] for pattern in patterns}
    for pattern, messages in got.items():
        await bus_case.other.subscribe(f"{unique}.{pattern}", keep(messages))
    await bus_case.settle()
    for subject in ("a.b", "a.b.c", "c.b", "a"):
        await bus_case.bus.publish(f"{unique}.{subject}", b"")
    expected = sum(map(len, patterns.values()))
    await eventually(lambda: sum(map(len, got.values())) >= expected)
    for pattern, subjects in patterns.items():
        assert [message.subject.removeprefix(f"{unique}.") for message in got[pattern]] == subjects


async def test_queue_group_shares_and_others_get_all(bus_case: BusCase, unique: str) -> None:
    """Each message goes to one member of each group and to every plain subscriber."""
    members: list[list[Message]] = [[], [], []]
    lonely: list[Message] = []
    plain: list[Message] = []
    for number, bus in enumerate((bus_case.bus, bus_case.other, bus_case.other)):
        await bus.subscribe(unique, keep(members[number]), queue="group")
    await bus_case.bus.subscribe(unique, keep(lonely), queue="another")
    await bus_case.other.subscribe(unique, keep(plain))
    await bus_case.settle()
    for number in range(300):
        await bus_case.bus.publish(unique, str(number).encode())
    await eventually(lambda: sum(map(len, members)) >= 300 and len(lonely) >= 300 and len(plain) >= 300)
    numbers = sorted(int(message.data) for messages in members for message in messages)
    assert numbers == list(range(300))
    assert all(messages for messages in members)
    assert [int(message.data) for message in plain] == [int(message.data) for message in lonely]


async def test_unsubscribed_handler_is_not_called_again(bus_case: BusCase, unique: str) -> None:
    """What was delivered but not handled is dropped; others still get theirs."""
    got: list[Message] = []
    rest: list[Message] = []
    subscription = await bus_case.bus.subscribe(unique, keep(got))
    await bus_case.bus.subscribe(unique, keep(rest))
    await bus_case.settle()
    await bus_case.other.publish(unique, b"1")
    await eventually(lambda: len(got) == 1)
    await subscription.unsubscribe()
    await bus_case.settle()
    await bus_case.other.publish(unique, b"2")
    await eventually(lambda: len(rest) == 2)
    assert len(got) == 1


async def test_failing_handler_gets_the_next_message(bus_case: BusCase, unique: str) -> None:
    """An exception ends the handling of one message and nothing else."""
    got: list[bytes] = []

    async def fail_on_odd(message: Message) -> None:
        got.append(message.data)
        if int(message.data) % 2:
            raise ValueError("odd")

    await bus_case.bus.subscribe(unique, fail_on_odd)
    await bus_case.settle()
    for number in range(6):
        await bus_case.other.publish(unique, str(number).encode())
    await eventually(lambda: len(got) == 6)
    assert got == [str(number).encode() for number in range(6)]


async def test_slow_handler_delays_its_own_subscription_only(bus_case: BusCase, unique: str) -> None:
    """One message at a time for each subscription, and no waiting between subscriptions."""
    release = asyncio.Event()
    running = 0
    most = 0
    handled: list[Message] = []
    quick: list[Message] = []

    async def slow(message: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await release.wait()
        running -= 1
        handled.append(message)

    await bus_case.bus.subscribe(unique, slow)
    await bus_case.bus.subscribe(unique, keep(quick))
    await bus_case.settle()
    for number in range(20):
        await bus_case.other.publish(unique, str(number).encode())
    await eventually(lambda: len(quick) == 20 and running == 1)
    assert not handled
    release.set()
    await eventually(lambda: len(handled) == 20)
    assert most == 1
    assert handled == quick
