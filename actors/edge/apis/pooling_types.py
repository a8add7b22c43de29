"""Wire types of the endpoints that pool: OpenAI's embeddings, and vLLM's score, rerank and classify."""

import base64
from typing import Annotated, Any, Final, Literal, cast

import msgspec
import numpy as np

from headwater.actors.edge.apis.openai.translate import turns_of
from headwater.actors.edge.apis.openai.types import MESSAGES_MAX, ChatMessage, Priority, refuse_template
from headwater.actors.edge.prompt.messages import Turn
from headwater.actors.edge.saga.fields import UnsupportedFields, rejected
from headwater.actors.http.decoding import decode_body
from headwater.actors.http.errors import bad_request

INPUTS_MAX: Final = 2_048
TEXTS_MAX: Final = 2_048
CONVERSATIONS_MAX: Final = 128

Messages = Annotated[
    list[ChatMessage | list[ChatMessage]], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)
]
Dimensions = Annotated[int, msgspec.Meta(ge=1, le=16_384)]


class PoolingCommon(UnsupportedFields, kw_only=True):
    """Fields of all these endpoints."""

    model: str
    user: str | None = None
    priority: Priority | None = None
    add_special_tokens: bool | None = None
    normalize: Annotated[Any, rejected(True)] = None
    use_activation: Annotated[Any, rejected(True)] = None
    activation: Annotated[Any, rejected(True)] = None
    embed_dtype: Annotated[Any, rejected("float32")] = None
    endianness: Annotated[Any, rejected("native", "little")] = None
    truncate_prompt_tokens: Annotated[Any, rejected()] = None


class EmbeddingRequest(PoolingCommon, kw_only=True):
    """POST /v1/embeddings: of `input`, or of `messages`, a conversation or a list of those as vLLM takes them."""

    input: str | list[Any] | None = None
    messages: Messages | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def inputs(self) -> list[str | list[int]]:
        """One entry per vector: a text, or token ids."""
        return entries(self.input or "", "input")

    def conversations(self) -> list[tuple[Turn, ...]]:
        """One conversation per vector. Raises `ApiError` 400 naming the message or part."""
        given = self.messages or []
        single = [one for one in given if isinstance(one, ChatMessage)]
        if len(single) == len(given):
            return [turns_of(single)]
        several = [one for one in given if isinstance(one, list) and one]
        if len(several) < len(given):
            raise bad_request(
                "messages is a list of messages, or a list of such lists; none of them empty.",
                param="messages",
            )
        if len(several) > CONVERSATIONS_MAX:
            raise bad_request(
                f"messages has more than {CONVERSATIONS_MAX} conversations; send several requests.",
                param="messages",
            )
        return [turns_of(one, f"messages[{number}]") for number, one in enumerate(several)]

    def refuse_unsupported(self) -> None:
        """See `UnsupportedFields.refuse_unsupported`."""
        super().refuse_unsupported()
        if (self.input is None) == (self.messages is None):
            raise bad_request("Send one of input and messages.", param="input")
        if self.add_generation_prompt and self.continue_final_message:
            raise bad_request(
                "continue_final_message and add_generation_prompt cannot both be true.",
                param="continue_final_message",
            )
        refuse_template(self.chat_template_kwargs)


class ClassifyRequest(PoolingCommon, kw_only=True):
    """POST /v1/classify."""

    input: str | list[Any]


class ScoreRequest(PoolingCommon, kw_only=True):
    """POST /v1/score: one text against one or several, or two lists of equal length."""

    text_1: str | list[str]
    text_2: str | list[str]

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs to score."""
        first, second = _list(self.text_1, "text_1"), _list(self.text_2, "text_2")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise bad_request(
                f"text_1 has {len(first)} texts and text_2 {len(second)}; send one text, or lists of equal length.",
                param="text_1",
            )
        return list(zip(first, second, strict=True))


class RerankRequest(PoolingCommon, kw_only=True):
    """POST /v1/rerank, in the format of Jina and Cohere."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        """The documents' texts."""
        texts = [one if isinstance(one, str) else one.get("text") for one in self.documents]
        if not all(isinstance(text, str) for text in texts):
            raise bad_request("documents must be strings, or objects with a text.", param="documents")
        return _list(cast(list[str], texts), "documents")


def entries(value: str | list[Any], param: str) -> list[str | list[int]]:
    """A text, a list of texts, token ids or a list of those, as a list of texts or token ids."""
    found: list[Any] = []
    if isinstance(value, str) or (value and all(type(one) is int for one in value)):
        found = [value]
    elif all(isinstance(one, str) for one in value) or all(
        isinstance(one, list) and all(type(token) is int for token in one) for one in value
    ):
        found = list(value)
    if not found or not all(found):
        raise bad_request(
            f"{param} must be a string, a list of token ids, or a list of either; none of them empty.",
            param=param,
        )
    if len(found) > INPUTS_MAX:
        raise bad_request(f"{param} has more than {INPUTS_MAX} entries; send several requests.", param=param)
    return found


def floats(vector: bytes) -> list[float]:
    """A vector's numbers."""
    return cast(list[float], np.frombuffer(vector, "<f4").tolist())


def embedding_json(index: int, vector: bytes, form: str) -> bytes:
    """One entry of `data`. In base64 the vector is its bytes, little-endian float32."""
    shown: Any = base64.b64encode(vector).decode() if form == "base64" else floats(vector)
    return msgspec.json.encode({"object": "embedding", "index": index, "embedding": shown})


def decode_embedding(body: bytes) -> EmbeddingRequest:
    """Read and check. Raises `ApiError` 400 naming the field."""
    return cast(EmbeddingRequest, decode_body(_embedding, body))


def decode_classify(body: bytes) -> ClassifyRequest:
    """Read and check. Raises `ApiError` 400 naming the field."""
    return cast(ClassifyRequest, decode_body(_classify, body))


def decode_score(body: bytes) -> ScoreRequest:
    """Read and check. Raises `ApiError` 400 naming the field."""
    return cast(ScoreRequest, decode_body(_score, body))


def decode_rerank(body: bytes) -> RerankRequest:
    """Read and check. Raises `ApiError` 400 naming the field."""
    return cast(RerankRequest, decode_body(_rerank, body))


def _list(texts: str | list[str], param: str) -> list[str]:
    found = [texts] if isinstance(texts, str) else texts
    if not found or not all(found):
        raise bad_request(f"{param} must be a string or a list of strings; none of them empty.", param=param)
    if len(found) > TEXTS_MAX:
        raise bad_request(f"{param} has more than {TEXTS_MAX} texts; send several requests.", param=param)
    return found


_embedding = msgspec.json.Decoder(EmbeddingRequest)
_classify = msgspec.json.Decoder(ClassifyRequest)
_score = msgspec.json.Decoder(ScoreRequest)
_rerank = msgspec.json.Decoder(RerankRequest)
