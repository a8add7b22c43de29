"""Bad input is refused at the edge with HTTP 400 that names the field, whatever engine serves the model.

`tests/vllm/test_rejections.py` has what vLLM itself refuses.
"""

import pytest

from headwater.engines.model_files import byte_tokenizer
from tests.support.clients.rejections import CHAT, COMPLETIONS, PROMPT, Case, assert_refused
from tests.support.marks import CLIENTS
from tests.support.processes.fleet import FleetProcess

pytestmark = [*CLIENTS, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(120)]


TOKENS = byte_tokenizer().get_vocab_size()
"""Of the simulated model."""

OUT_OF_RANGE_OF_SIM = [
    Case("stop token", "stop_token_ids", {"stop_token_ids": [TOKENS]}),
    Case("large stop token", "stop_token_ids", {"stop_token_ids": [2**32 - 1]}),
    Case("stop token in a chat", "stop_token_ids", {"stop_token_ids": [1, TOKENS]}, CHAT),
    Case("bias", "logit_bias", {"logit_bias": {str(TOKENS): 1}}),
    Case("top_p", "top_p", {"top_p": 0}),
    Case("top_p in a chat", "top_p", {"top_p": 0.0}, CHAT),
]


@pytest.mark.parametrize("case", OUT_OF_RANGE_OF_SIM, ids=lambda case: case.name)
async def test_the_edge_knows_the_vocabulary(up: FleetProcess, case: Case) -> None:
    """Token ids and ranges are checked against the model's own vocabulary, whatever engine serves it."""
    await assert_refused(up, case, "sim")


async def test_the_last_token_of_the_vocabulary_is_in_range(up: FleetProcess) -> None:
    """The bound is not one too small."""
    async with up.client() as client:
        body = {"model": "sim", **PROMPT, "stop_token_ids": [0, TOKENS - 1], "top_p": 0.01}
        answer = await client.post(COMPLETIONS, json=body)
        assert answer.status_code == 200, answer.text
