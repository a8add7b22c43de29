"""The audit of commands: each is published once per incarnation until the log confirms it, in order, within a bound."""

from headwater.actors.worker.incarnation import PENDING_MAX, CommandAudit
from headwater.schemas.control import ControlReply, ControlRequest


class Publisher:
    """An incarnation whose writer takes `room` commands."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = room
        self.published: list[str] = []

    def __call__(self, request: ControlRequest, reply: ControlReply) -> bool:
        """See `PublishCommand`."""
        if not self.room:
            return False
        self.room -= 1
        self.published.append(request.by)
        return True


def record(audit: CommandAudit, *names: str) -> None:
    """Commands of these operators."""
    for name in names:
        audit.record(ControlRequest("wake", by=name), ControlReply(200, "awake"))


def test_commands_without_an_incarnation_are_published_by_the_next() -> None:
    audit, one = CommandAudit(), Publisher()
    record(audit, "a")
    audit.begin_incarnation(one)
    record(audit, "b")
    assert one.published == ["a", "b"]


def test_what_the_log_did_not_confirm_is_published_again() -> None:
    audit, one, two = CommandAudit(), Publisher(), Publisher()
    audit.begin_incarnation(one)
    record(audit, "a", "b", "c")
    audit.confirm()
    audit.end_incarnation()
    record(audit, "d")
    audit.begin_incarnation(two)
    assert one.published == ["a", "b", "c"]
    assert two.published == ["b", "c", "d"]


def test_a_full_writer_gets_the_rest_later_and_confirmations_stay_in_step() -> None:
    audit, one, two = CommandAudit(), Publisher(room=1), Publisher()
    audit.begin_incarnation(one)
    record(audit, "a", "b")
    assert one.published == ["a"]
    audit.confirm()
    audit.confirm()
    one.room = 1
    record(audit, "c")
    assert one.published == ["a", "b"]
    audit.end_incarnation()
    audit.begin_incarnation(two)
    assert two.published == ["b", "c"]


def test_only_so_many_wait() -> None:
    """Past the bound the oldest unpublished one is dropped; those in the writer's queue are kept in step."""
    audit, one, two = CommandAudit(), Publisher(room=1), Publisher()
    audit.begin_incarnation(one)
    names = [f"op{number}" for number in range(PENDING_MAX + 3)]
    record(audit, *names)
    audit.confirm()
    audit.end_incarnation()
    audit.begin_incarnation(two)
    assert two.published == names[3:]
