"""POST /v1/embeddings, /v1/classify, /v1/score and /v1/rerank: from a body to vectors to an answer."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from headwater.actors.edge.capabilities import pooling_task
from headwater.actors.edge.errors import ApiError, bad_request
from headwater.actors.edge.generation import tokens_of
from headwater.actors.edge.http import ClientGone, Disconnect, Headers, respond
from headwater.actors.edge.models import Model
from headwater.actors.edge.pooling import Job, Pooling
from headwater.actors.edge.pooling_record import PoolingRecord
from headwater.actors.edge.pooling_wire import (
    Common,
    decode_classify,
    decode_embedding,
    decode_rerank,
    decode_score,
    embedding_json,
    entries,
    floats,
)
from headwater.actors.edge.serving import Call, Serving
from headwater.actors.edge.wishes import Wishes, wishes_of
from headwater.schemas.hashing import U32

TOKENS_MAX: Final = 1_000_000
"""Prompt tokens of one request, over all of its inputs."""

WRITTEN_A_TURN: Final = 64
ENCODED_A_TURN: Final = 16
"""Vectors written as JSON, and texts encoded, in one turn of the event loop: streams wait for no more than that."""


class PoolingApi:
    """The endpoints that pool."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._pooling = Pooling(serving.fleet)

    async def embeddings(self, call: Call) -> None:
        """POST /v1/embeddings."""
        request = decode_embedding(call.body)
        self._serving.check(request)
        model = self._serving.models.get(request.model)
        task = pooling_task(model.card, "embed")
        special = request.add_special_tokens is not False
        prompts = await _tokens(model, request.inputs(), "input", special=special)
        name = self._name("embd")
        wishes = self._wishes(call, request)
        job = Job(name, model, prompts, task, request.dimensions or 0, wishes=wishes)
        vectors = await self._run("embeddings", job, call, "input")
        form = request.encoding_format or "float"
        parts: list[bytes] = []
        for index, vector in enumerate(vectors):
            parts.append(embedding_json(index, vector, form))
            if index % WRITTEN_A_TURN == WRITTEN_A_TURN - 1:
                await asyncio.sleep(0)
        rest = msgspec.json.encode({"model": model.card.name, "usage": _usage(prompts)})
        body = b'{"object":"list","data":[' + b",".join(parts) + b"]," + rest[1:]
        await respond(call.send, 200, body, _headers(name))

    async def classify(self, call: Call) -> None:
        """POST /v1/classify: the probability of each class; classes are named as Hugging Face does by default."""
        request = decode_classify(call.body)
        self._serving.check(request)
        model = self._serving.models.get(request.model)
        task = pooling_task(model.card, "classify")
        special = request.add_special_tokens is not False
        prompts = await _tokens(model, entries(request.input, "input"), "input", special=special)
        job = Job(self._name("classify"), model, prompts, task, wishes=self._wishes(call, request))
        data = []
        for index, vector in enumerate(await self._run("classify", job, call, "input")):
            shares = floats(vector)
            label = f"LABEL_{shares.index(max(shares))}"
            data.append({"index": index, "label": label, "probs": shares, "num_classes": len(shares)})
        await self._answer(call, job, {"object": "list", "data": data})

    async def score(self, call: Call) -> None:
        """POST /v1/score: how well the texts of each pair belong together."""
        request = decode_score(call.body)
        self._serving.check(request)
        model = self._serving.models.get(request.model)
        wishes = self._wishes(call, request)
        job, scores = await self._scores("score", model, request.pairs(), call, wishes)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        await self._answer(call, job, {"object": "list", "data": data})

    async def rerank(self, call: Call) -> None:
        """POST /v1/rerank: the documents, best first."""
        request = decode_rerank(call.body)
        self._serving.check(request)
        model = self._serving.models.get(request.model)
        texts = request.texts()
        pairs = [(request.query, text) for text in texts]
        job, scores = await self._scores("rerank", model, pairs, call, self._wishes(call, request))
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results: list[dict[str, Any]] = []
        for index in order[: request.top_n or len(order)]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if request.return_documents is not False:
                result["document"] = {"text": texts[index]}
            results.append(result)
        await self._answer(call, job, {"results": results})

    async def _scores(
        self, endpoint: str, model: Model, pairs: Sequence[tuple[str, str]], call: Call, wishes: Wishes
    ) -> tuple[Job, list[float]]:
        """By a model that reads both texts at once, else by the angle between the vectors of the two."""
        task = pooling_task(model.card, "score", "embed")
        prompts: list[U32] = []
        if task == "score":
            segments: list[int] = []
            for first, second in pairs:
                prompt, segment = await model.tokenizer.encode_pair(first, second)
                prompts.append(prompt)
                segments.append(segment)
            job = Job(self._name(endpoint), model, prompts, task, 0, tuple(segments), wishes)
            vectors = await self._run(endpoint, job, call, "model")
            if any(len(vector) != 4 for vector in vectors):
                raise ApiError(
                    502, f"{model.card.name} gave several numbers for one pair.", kind="server_error"
                )
            return job, [floats(vector)[0] for vector in vectors]
        # Each text once, however many pairs it is in.
        places = {
            text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))
        }
        prompts = await _tokens(model, list(places), "model", special=True)
        job = Job(self._name(endpoint), model, prompts, task, wishes=wishes)
        vectors = await self._run(endpoint, job, call, "model")
        return job, [_cosine(vectors[places[first]], vectors[places[second]]) for first, second in pairs]

    async def _run(self, endpoint: str, job: Job, call: Call, param: str) -> list[bytes]:
        """Have the vectors made, unless the client hangs up. Raises `ApiError`, `ClientGone`."""
        _check(job, param)
        self._serving.require_open()
        tokens = sum(len(prompt) for prompt in job.prompts)
        record = PoolingRecord(self._serving, call, job.request, job.model.card.name, endpoint)
        record.accepted(tokens, len(job.prompts))
        client = Disconnect(call.receive)
        work = asyncio.ensure_future(self._pooling.vectors(job, record.routed))
        reason, why = "cancelled", ""
        try:
            if await client.or_done(work):
                raise ClientGone
            vectors = work.result()
            if not all(np.isfinite(np.frombuffer(vector, "<f4")).all() for vector in vectors):
                raise ApiError(
                    502, f"{job.model.card.name} gave a vector with no numbers.", kind="server_error"
                )
            reason = "stop"
            return vectors
        except ClientGone:
            raise
        except Exception as error:
            reason, why = "error", str(error)
            raise
        finally:
            client.stop()
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            record.ended(reason, why)

    async def _answer(self, call: Call, job: Job, document: dict[str, Any]) -> None:
        world = self._serving.fleet.world
        head = {
            "id": job.request,
            "created": world.clock.wall_ns() // 1_000_000_000,
            "model": job.model.card.name,
        }
        body = msgspec.json.encode({**head, **document, "usage": _usage(job.prompts)})
        await respond(call.send, 200, body, _headers(job.request))

    def _wishes(self, call: Call, request: Common) -> Wishes:
        limits = self._serving.limits
        return wishes_of(call.headers, limits, user=request.user, priority=request.priority)

    def _name(self, prefix: str) -> str:
        return f"{prefix}-{self._serving.fleet.world.ids()}"


async def _tokens(model: Model, inputs: Sequence[str | list[int]], param: str, *, special: bool) -> list[U32]:
    """The prompts. Short texts are encoded on the event loop, so it is let go on between them."""
    prompts: list[U32] = []
    for entry in inputs:
        prompts.append(await tokens_of(model, entry, param, special=special))
        if not len(prompts) % ENCODED_A_TURN:
            await asyncio.sleep(0)
    return prompts


def _check(job: Job, param: str) -> None:
    context = job.model.card.context_length
    total = 0
    for prompt in job.prompts:
        total += len(prompt)
        if not len(prompt):
            raise bad_request("An input has no tokens.", param=param)
        if len(prompt) > context:
            raise bad_request(
                f"This model's context is {context} tokens; an input has {len(prompt)}.",
                param=param,
                code="context_length_exceeded",
            )
    if total > TOKENS_MAX:
        raise bad_request(
            f"The inputs have {total} tokens, at most {TOKENS_MAX} go into one request: send several.",
            param=param,
        )


def _cosine(first: bytes, second: bytes) -> float:
    one, two = np.frombuffer(first, "<f4").astype(float), np.frombuffer(second, "<f4").astype(float)
    size = float(np.linalg.norm(one) * np.linalg.norm(two))
    return float(one @ two) / size if size else 0.0


def _usage(prompts: Sequence[U32]) -> dict[str, int]:
    tokens = sum(len(prompt) for prompt in prompts)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _headers(request: str) -> Headers:
    return [(b"x-request-id", request.encode())]
