"""Parameters of a hand-off on their way from one engine to another: bound to their prompt, and checked for damage.

Engines believe what they are given: vLLM reads whatever blocks are named, and an SGLang that enters a room with another
prompt answers with the other one's first token. So a prefill leg seals its parameters, and the decode leg opens them
only if they arrived unchanged, for the same tokens, LoRA adapter and salt.
"""

from hashlib import blake2b

import msgspec

from headwater.schemas.messages.inference import GenerateRequest, prompt_digest

CHECKSUM_BYTES = 8


class Unusable(Exception):
    """The parameters of a hand-off cannot be used; the message says why."""


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    prompt: bytes
    params: bytes
    checksum: bytes


def seal(params: bytes, request: GenerateRequest) -> bytes:
    """The parameters of the prefill leg `request`, for the decode leg of the same prompt."""
    prompt = digest_of(request)
    return msgspec.msgpack.encode(_Sealed(prompt, params, _checksum(prompt, params)))


def unseal(sealed: bytes, request: GenerateRequest | None = None) -> bytes:
    """The parameters for the decode leg `request`, or, without a request, to release them. Raises `Unusable`."""
    try:
        found = msgspec.msgpack.decode(sealed, type=_Sealed)
    except msgspec.DecodeError as error:
        raise Unusable(f"it is damaged: {error}") from error
    if found.checksum != _checksum(found.prompt, found.params):
        raise Unusable("it is damaged: its checksum is wrong")
    if request is not None and found.prompt != digest_of(request):
        raise Unusable("it is another prompt's")
    return found.params


def digest_of(request: GenerateRequest) -> bytes:
    """Digest of the prompt of a request, with all that its KV depends on."""
    return prompt_digest(request.lora_name, request.cache_salt, request.tokens, request.media)


def _checksum(prompt: bytes, params: bytes) -> bytes:
    return blake2b(prompt + params, digest_size=CHECKSUM_BYTES).digest()
