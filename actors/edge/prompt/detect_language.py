"""Detection of a recording's language before its pieces are transcribed: one more choice of the request, of one token, on any worker."""

import asyncio

from headwater.actors.edge.prompt.prepare import Prepared
from headwater.actors.edge.saga.dispatch import ChoiceMessages
from headwater.actors.edge.saga.driver import ChoiceDriver
from headwater.actors.edge.saga.placement import Dispatcher
from headwater.actors.edge.saga.record import RequestLogWriter
from headwater.actors.edge.saga.types import ChoiceSpec
from headwater.actors.http.errors import ApiError
from headwater.schemas.constraints import Constraints
from headwater.schemas.messages.inference import TokenLogprob
from headwater.schemas.messages.media import media_features
from headwater.schemas.tables import required_capabilities


class LanguageChoice:
    """The choice, numbered after those of the `prepared` request. `driver` carries it out; this is its `ChoiceOutput`."""

    def __init__(
        self, request: str, prepared: Prepared, dispatcher: Dispatcher, record: RequestLogWriter
    ) -> None:
        detection = prepared.detection
        assert detection is not None
        self._detection = detection
        self._ended = asyncio.Event()
        card, sampling = prepared.model.card, detection.sampling
        media = (prepared.chunks[0].media(len(detection.prompt)),)
        needs = required_capabilities(sampling, **media_features(media))
        spec = ChoiceSpec(
            request,
            len(prepared.prompts) * prepared.per_prompt,
            sampling,
            Constraints(needs=needs),
            cache_salt=prepared.salt.value,
            tokenizer=card.tokenizer,
            migrations_max=card.migrations_max,
        )
        messages = ChoiceMessages(spec, detection.prompt, card.block_size, dispatcher, media)
        self.driver = ChoiceDriver(spec, messages, dispatcher.workers, record, self)

    async def language(self) -> str:
        """The code of the language. Raises `ApiError`. May be cancelled: then `driver` is the caller's to cancel."""
        await self.driver.place()
        await self._ended.wait()
        if self.driver.error is not None:
            raise self.driver.error
        found = self._detection.language_of(self.driver.emitted[0]) if self.driver.emitted else ""
        if not found:
            raise ApiError(
                502, "The engine detected no language; name it.", kind="server_error", param="language"
            )
        return found

    def write_tokens(self, index: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> None:
        """See `ChoiceOutput.write_tokens`: they are read at the end."""

    def write_end(self, index: int) -> None:
        """See `ChoiceOutput.write_end`."""
        self._ended.set()
