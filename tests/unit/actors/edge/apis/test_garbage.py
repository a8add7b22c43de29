"""A request that ended is freed at once: edges rarely look for what only the garbage collector can free."""

import gc
from typing import Any

import pytest

from headwater.actors.edge.answer.run import Generation
from headwater.actors.edge.saga.driver import ChoiceDriver
from headwater.actors.http.asgi import Disconnect
from tests.support.worlds.edge import EdgeWorld

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stream": True}, {"stop": ["e"]}, {"max_tokens": 1}])
def test_nothing_of_a_request_is_left_for_the_garbage_collector(more: dict[str, Any]) -> None:
    """Neither of one choice nor of several, whole or streamed."""
    with EdgeWorld() as edge:
        edge.ask("/v1/chat/completions", CHAT)
        gc.collect()
        gc.disable()
        try:
            assert edge.ask("/v1/chat/completions", CHAT | more).status == 200
            parts = (Generation, ChoiceDriver, Disconnect)
            left = [type(one).__name__ for one in gc.get_objects() if type(one) in parts]
        finally:
            gc.enable()
    assert not left
