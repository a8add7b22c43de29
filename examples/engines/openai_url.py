"""A server with OpenAI's API as an engine: llama.cpp, Ollama, or another Headwater.

    headwater up --engine examples/engines/openai_url.py --model FOLDER --engine-options '{"url": "http://host:8080/v1"}'

`--model` is a folder with the tokenizer of the model that the server has. Prompts are sent as token ids; for servers that
take text only (Ollama), and for other tokenizers, add `"prompt": "text"`. `"model"` chooses one of several models.
"""

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
from tokenizers import Tokenizer

from headwater.engines.custom import (
    EngineError,
    EngineInfo,
    EngineRequest,
    EngineSetup,
    EngineUnavailable,
    Finish,
    RequestRejected,
    Step,
)

OPTIONS = {"url", "model", "prompt"}
SAMPLING = ("max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")


class OpenAiUrl:
    """Text of the server is turned into tokens again: an edge counts and detokenizes those."""

    features = ("seed",)

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Find the server and its model. The key, if it wants one, is in OPENAI_API_KEY."""
        if unknown := sorted(set(setup.options) - OPTIONS):
            raise EngineUnavailable(f"option {unknown[0]!r} is none of {', '.join(sorted(OPTIONS))}")
        url = str(setup.options.get("url", "http://127.0.0.1:8080/v1")).rstrip("/") + "/"
        key = os.environ.get("OPENAI_API_KEY", "none")
        self.client = httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=httpx.Timeout(10, read=None)
        )
        self.tokenizer = Tokenizer.from_buffer(setup.files.tokenizer)
        self.as_text = setup.options.get("prompt") == "text"
        try:
            models = (await self.client.get("models")).raise_for_status().json()["data"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise EngineUnavailable(f"{url}models has no list of models: {error}") from error
        self.model = str(setup.options.get("model") or models[0]["id"])
        return setup.info(version=f"openai/{self.model}")

    async def generate(self, request: EngineRequest) -> AsyncIterator[Step]:
        """Stream a completion."""
        text = self.tokenizer.decode(request.tokens, skip_special_tokens=False)
        body: dict[str, Any] = {name: getattr(request.sampling, name) for name in SAMPLING}
        body |= {"model": self.model, "stream": True, "prompt": text if self.as_text else [*request.tokens]}
        try:
            async with self.client.stream("POST", "completions", json=body) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    # The client's mistake is the same on every worker; the server's is not.
                    error = RequestRejected if answer.status_code < 500 else EngineError
                    raise error(f"{answer.status_code} of {answer.url}: {answer.text[:500]}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        yield self.step(json.loads(line[len("data: ") :]))
        except httpx.HTTPError as problem:
            raise EngineError(f"{type(problem).__name__} of {self.client.base_url}: {problem}") from problem

    def step(self, chunk: dict[str, Any]) -> Step:
        """The tokens of one chunk."""
        choice = chunk["choices"][0] if chunk.get("choices") else {}
        tokens = self.tokenizer.encode(choice.get("text") or "", add_special_tokens=False).ids
        reason = choice.get("finish_reason")
        finish: Finish = "length" if reason == "length" else "stop" if reason else ""
        return Step(tuple(tokens), finish)

    async def check(self) -> None:
        """A server that does not answer any more ends this worker, which is started again until it does."""
        (await self.client.get("models")).raise_for_status()

    async def stop(self) -> None:
        """Close the connections."""
        await self.client.aclose()
