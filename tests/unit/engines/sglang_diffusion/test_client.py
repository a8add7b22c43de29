"""What the client of SGLang's diffusion server makes of a server that goes away."""

import httpx
import pytest

from headwater.engines.engine import EngineError
from headwater.engines.sglang_diffusion.client import DiffusionClient

CLOSED = (httpx.ConnectError("refused"), AttributeError("'NoneType' object has no attribute 'getpeername'"))
"""What httpx raises where nothing listens, and anyio where the server closes the connection before anyio asked for its peer."""


@pytest.mark.parametrize("error", CLOSED, ids=lambda error: type(error).__name__)
async def test_a_server_that_goes_away_is_an_engine_error(error: Exception) -> None:
    """An error of another type would end the health check that is to find it."""

    def fail(_: httpx.Request) -> httpx.Response:
        raise error

    client = DiffusionClient("http://127.0.0.1:9")
    client._http = httpx.AsyncClient(base_url="http://127.0.0.1:9", transport=httpx.MockTransport(fail))
    assert not await client.is_healthy()
    with pytest.raises(EngineError, match=str(error)):
        await client.model()
    await client.close()
