"""Fields that would change the answer and are not served: refused by name rather than silently dropped."""

from typing import Any, Final

from headwater.actors.edge.errors import bad_request
from headwater.actors.edge.our_fields import Ours

_NOTHING: Final[tuple[Any, ...]] = (None,)
_OFF: Final[tuple[Any, ...]] = (None, False)
_EMPTY: Final[tuple[Any, ...]] = (None, [])

HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "chat_template": _NOTHING,
    "prompt_logprobs": _NOTHING,
    "prompt_embeds": _NOTHING,
    "input_embeds": _NOTHING,
    "truncate_prompt_tokens": _NOTHING,
    "repetition_detection": _NOTHING,
    "thinking_token_budget": _NOTHING,
    "guided_whitespace_pattern": _NOTHING,
    "use_beam_search": _OFF,
    "include_stop_str_in_output": _OFF,
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "watermarking": _OFF,
    "continue_final_message": _OFF,
    "length_penalty": (None, 1),
    "skip_special_tokens": (None, True),
    "allowed_token_ids": _EMPTY,
    "bad_words": _EMPTY,
    "logprob_token_ids": _EMPTY,
    "functions": _EMPTY,
    "function_call": (None, "none", "auto"),
    "audio": _NOTHING,
    "modalities": (None, [], ["text"]),
    "web_search_options": _NOTHING,
}
"""The values that mean the same as leaving the field out."""

_MENDS: Final = {
    "chat_template": "the operator of a worker chooses it (--chat-template)",
    "functions": "use tools",
    "prompt_logprobs": "logprobs are given for the answer only",
    "truncate_prompt_tokens": "send a prompt that fits",
}


class NotServed(Ours, kw_only=True):
    """See `HARMLESS`."""

    chat_template: Any = None
    prompt_logprobs: Any = None
    prompt_embeds: Any = None
    input_embeds: Any = None
    truncate_prompt_tokens: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    guided_whitespace_pattern: Any = None
    use_beam_search: Any = None
    include_stop_str_in_output: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    watermarking: Any = None
    continue_final_message: Any = None
    length_penalty: Any = None
    skip_special_tokens: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logprob_token_ids: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None

    def refuse_unsupported(self) -> None:
        """What else an endpoint refuses. Raises `ApiError` 400 for a field that would change the answer."""
        self.refuse_not_served()

    def refuse_not_served(self) -> None:
        """Raises `ApiError` 400 for the first field that asks for something else than what is done anyway."""
        for name in HARMLESS:
            value = getattr(self, name)
            if value is not None and not any(value == harmless for harmless in HARMLESS[name]):
                mend = _MENDS.get(name, "leave it out")
                raise bad_request(f"{name} is not supported by this release: {mend}.", param=name)
