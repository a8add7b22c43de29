"""What `/v1/responses` and `/v1/conversations` store: chains, items, paging, conversations, and a store that fails."""

from typing import Any

import msgspec
import pytest

from headwater.actors.edge.apis import responses_creation
from headwater.actors.edge.apis.responses_endpoints import ResponsesRoutes
from headwater.events.ports import LogUnavailable
from headwater.events.table import Table, TableEntry
from tests.support.marks import OFFICIAL_CLIENT
from tests.support.worlds.edge import ANSWER, EdgeWorld
from tests.unit.actors.edge.apis.responses.asking import (
    USER,
    create,
    error_of,
    prompt,
    prompt_tokens,
)
from tests.unit.actors.edge.apis.responses.official import (
    check_conversation_items,
    check_items,
    check_schema,
    events_of,
)

pytestmark = OFFICIAL_CLIENT


def test_a_response_is_retrieved_listed_and_deleted(edge: EdgeWorld) -> None:
    made = create(
        edge, input=[USER, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Bye."}]
    )
    path = f"/v1/responses/{made.document['id']}"
    assert edge.ask(path, b"", method="GET").document == made.document
    listed = check_items(edge.ask(f"{path}/input_items?order=asc", b"", method="GET").body)
    assert [item.type for item in listed.data] == ["message"] * 3
    assert error_of(edge.ask(f"{path}?stream=true", b"", method="GET"))["param"] == "stream"
    assert error_of(edge.ask(f"{path}/cancel", b""))["param"] == "response_id"
    deleted = edge.ask(path, b"", method="DELETE").document
    assert deleted == {"id": made.document["id"], "object": "response.deleted", "deleted": True}
    for method, suffix in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        error_of(edge.ask(path + suffix, b"", method=method), 404)


def test_pages_of_input_items(edge: EdgeWorld) -> None:
    made = create(edge, input=[{"role": "user", "content": f"{n}"} for n in range(5)])
    path = f"/v1/responses/{made.document['id']}/input_items"

    def page(query: str) -> Any:
        return check_items(edge.ask(f"{path}?{query}", b"", method="GET").body)

    def texts(query: str) -> list[str]:
        return [item.content[0].text for item in page(query).data]

    assert texts("limit=2") == ["4", "3"]
    first = page("limit=2&order=asc")
    assert (first.has_more, first.first_id, first.last_id) == (True, first.data[0].id, first.data[1].id)
    assert texts(f"limit=2&order=asc&after={first.last_id}") == ["2", "3"]
    last = page(f"order=asc&after={page('order=asc').data[-1].id}")
    assert (last.data, last.first_id, last.has_more) == ([], "", False)
    for query, param in (
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
    ):
        assert error_of(edge.ask(f"{path}?{query}", b"", method="GET"))["param"] == param


def test_a_chain_has_every_turn_before_it(edge: EdgeWorld) -> None:
    first = create(edge, input="one", instructions="Not carried over.")
    second = create(edge, input="two", previous_response_id=first.document["id"])
    third = create(edge, input="three", previous_response_id=second.document["id"], stream=True)
    assert events_of(third.body)[-1].type == "response.completed"
    text = prompt(edge)
    assert [word for word in ("one", "two", "three") if f"user\n{word}<" in text] == ["one", "two", "three"]
    assert text.count(ANSWER) == 2
    assert "Not carried over" not in text
    error = error_of(create(edge, previous_response_id="resp_none"))
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def test_what_is_not_to_be_stored_is_not(edge: EdgeWorld) -> None:
    made = create(edge, store=False)
    assert made.document["store"] is False
    error_of(edge.ask(f"/v1/responses/{made.document['id']}", b"", method="GET"), 404)


def test_what_is_too_large_to_store_is_refused_where_the_store_was_asked_for(
    edge: EdgeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is generated. By default, when clients may never continue, the answer says so from its first event on."""
    conversation = edge.ask("/v1/conversations", b"").document["id"]
    monkeypatch.setattr(responses_creation, "INPUT_CHARACTERS_MAX", 300)
    before = len(edge.given)
    for fields, param in (({"store": True}, "store"), ({"conversation": conversation}, "conversation")):
        for where in ({"input": "x" * 301}, {"instructions": "x" * 301}):
            error = error_of(create(edge, **fields, **where))
            assert (error["param"], error["code"]) == (param, "object_too_large")
    assert len(edge.given) == before
    events = events_of(create(edge, input="x" * 301, stream=True).body)
    assert [event.response.store for event in (events[0], events[-1])] == [False, False]
    assert create(edge, input="x" * 301, store=False).status == 200
    assert create(edge, input="x" * 200, store=True).document["store"] is True


def test_an_item_is_referred_to_by_its_id(edge: EdgeWorld) -> None:
    made = create(edge, input="the first question")
    answer = made.document["output"][0]["id"]
    reference = {"type": "item_reference", "id": answer}
    assert create(edge, input=[reference, {"role": "user", "content": "Go."}]).status == 200
    assert f"assistant\n{ANSWER}" in prompt(edge)


def test_calls_and_their_results_become_turns(edge: EdgeWorld) -> None:
    items: list[dict[str, Any]] = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "the result"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "more"}],
        },
    ]
    made = create(edge, input=items)
    assert made.status == 200
    # This template knows no calls: they are texts.
    assert '{"name": "f", "arguments": {}}' in prompt(edge)
    assert "tool\nthe result" in prompt(edge)
    listed = edge.ask(f"/v1/responses/{made.document['id']}/input_items", b"", method="GET")
    kinds = [item.type for item in check_items(listed.body).data]
    assert kinds == [item["type"] for item in reversed(items)]


def test_tokens_are_counted_without_generating(edge: EdgeWorld) -> None:
    before = len(edge.given)
    counted = create(edge, "/v1/responses/input_tokens", instructions="Be brief.")
    assert len(edge.given) == before
    create(edge, instructions="Be brief.")
    assert counted.document == {"object": "response.input_tokens", "input_tokens": len(prompt_tokens(edge))}


def test_truncation_drops_the_oldest_turns(edge: EdgeWorld) -> None:
    turns = [{"role": "user", "content": f"{n}" + "x" * 600} for n in range(12)]
    items = [{"role": "developer", "content": "Keep me."}, *turns]
    assert error_of(create(edge, input=items, max_output_tokens=20))["code"] == "context_length_exceeded"
    assert create(edge, input=items, max_output_tokens=20, truncation="auto").status == 200
    text = prompt(edge)
    assert "Keep me." in text
    assert "11xxx" in text
    assert "user\n0xxx" not in text
    # As many as fit: one more turn would not.
    assert 4096 - 20 - 640 < len(prompt_tokens(edge)) <= 4096 - 20
    one = [{"role": "user", "content": "x" * 9000}]
    assert error_of(create(edge, input=one, truncation="auto"))["code"] == "context_length_exceeded"


def test_a_compacted_conversation_continues(edge: EdgeWorld) -> None:
    items = [USER, {"role": "assistant", "content": "Hi."}]
    found = edge.ask("/v1/responses/compact", {"model": "m", "input": items})
    check_schema(found.document, "CompactResource")
    assert [item["type"] for item in found.document["output"]] == ["message", "compaction"]
    assert found.document["usage"]["output_tokens"] > 0
    again = create(edge, input=[*found.document["output"], {"role": "user", "content": "Go on."}])
    assert again.status == 200
    assert ANSWER in prompt(edge)


def test_compaction_needs_a_model_and_an_input(edge: EdgeWorld) -> None:
    assert edge.ask("/v1/responses/compact", {"input": [USER]}).status == 400
    assert error_of(edge.ask("/v1/responses/compact", {"model": "m"}))["param"] == "input"


def test_a_conversation_collects_input_and_output(edge: EdgeWorld) -> None:
    made = edge.ask("/v1/conversations", {"metadata": {"k": "v"}, "items": [USER]}).document
    assert (made["object"], made["metadata"]) == ("conversation", {"k": "v"})
    path = f"/v1/conversations/{made['id']}"
    response = create(edge, input="Next.", conversation={"id": made["id"]}, store=False)
    assert response.document["conversation"] == {"id": made["id"]}
    listed = edge.ask(f"{path}/items?order=asc", b"", method="GET")
    items = check_conversation_items(listed.body).data
    assert [item.role for item in items if item.type == "message"] == ["user", "user", "assistant"]
    create(edge, input="Last.", conversation=made["id"])
    assert f"assistant\n{ANSWER}" in prompt(edge)
    assert "user\nHello." in prompt(edge)


def test_items_of_a_conversation_are_added_read_and_deleted(edge: EdgeWorld) -> None:
    made = edge.ask("/v1/conversations", b"").document
    path = f"/v1/conversations/{made['id']}"
    added = check_conversation_items(edge.ask(f"{path}/items", {"items": [USER, USER]}).body)
    first, second = (item.id for item in added.data)
    assert edge.ask(f"{path}/items/{first}", b"", method="GET").document["id"] == first
    assert edge.ask(f"{path}/items/{first}", b"", method="DELETE").document["id"] == made["id"]
    error_of(edge.ask(f"{path}/items/{first}", b"", method="GET"), 404)
    left = check_conversation_items(edge.ask(f"{path}/items", b"", method="GET").body)
    assert [item.id for item in left.data] == [second]
    assert edge.ask(path, {"metadata": {"a": "b"}}).document["metadata"] == {"a": "b"}
    assert edge.ask(path, b"", method="DELETE").document["object"] == "conversation.deleted"
    for method, suffix, body in (
        ("GET", "", b""),
        ("POST", "", b'{"metadata":{}}'),
        ("DELETE", "", b""),
        ("GET", "/items", b""),
        ("POST", "/items", b'{"items":[{"role":"user","content":"x"}]}'),
        ("GET", f"/items/{second}", b""),
        ("DELETE", f"/items/{second}", b""),
    ):
        error_of(edge.ask(path + suffix, body, method=method), 404)
    error_of(create(edge, conversation=made["id"]), 404)


class FailingTable:
    """A table whose server does not answer. See `Table`."""

    def __init__(self, table: Table, *, fails_reads: bool) -> None:
        self._table = table
        self._fails_reads = fails_reads

    async def put(self, key: str, value: bytes, *, ttl_s: int = 0) -> int:
        raise LogUnavailable("no answer")

    async def get(self, key: str) -> TableEntry | None:
        if self._fails_reads:
            raise LogUnavailable("no answer")
        return await self._table.get(key)


def _with_table(edge: EdgeWorld, table: Any) -> None:
    """Replace the table under the edge's stores."""
    routes: ResponsesRoutes = edge.app._responses
    routes.objects._table = table


def test_an_answer_that_cannot_be_stored_is_given_and_says_so(edge: EdgeWorld) -> None:
    _with_table(edge, FailingTable(edge.world.stored, fails_reads=False))
    try:
        for stream in (False, True):
            found = create(edge, stream=stream)
            if stream:
                final = msgspec.json.decode(found.body.rstrip().rpartition(b"data: ")[2])["response"]
            else:
                final = found.document
            assert final["status"] == "completed"
            assert final["store"] is False
    finally:
        _with_table(edge, edge.world.stored)


def test_a_request_that_needs_the_store_is_refused_without_it(edge: EdgeWorld) -> None:
    made = create(edge).document["id"]
    before = len(edge.given)
    _with_table(edge, FailingTable(edge.world.stored, fails_reads=True))
    try:
        refused = create(edge, previous_response_id=made)
        assert error_of(refused, 503)["code"] == "overloaded"
        assert b"retry-after" in refused.headers
        error_of(edge.ask(f"/v1/responses/{made}", b"", method="GET"), 503)
    finally:
        _with_table(edge, edge.world.stored)
    assert len(edge.given) == before


def test_a_conversation_is_a_session(edge: EdgeWorld) -> None:
    """Its requests go where its earlier ones went; a prompt_cache_key says it more exactly."""
    made = edge.ask("/v1/conversations", {}).document["id"]
    sessions = []
    for fields in (
        {"conversation": made},
        {"conversation": {"id": made}, "user": "u"},
        {"prompt_cache_key": "k"},
        {},
    ):
        assert create(edge, **fields).status == 200
        sessions.append(edge.queries[-1].preferences.session)
    assert sessions[0] == sessions[1] != sessions[2]
    assert sessions[0].startswith("cache-")
    assert made not in sessions[0]
    assert sessions[3] == ""
