"""nkeys: ed25519 keys as NATS spells them. The server knows the public half; the seed never leaves its file."""

import secrets

import nkeys

from headwater.ops.config.errors import ConfigError


def new_seed() -> str:
    """A fresh user seed, `SU…`."""
    seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    return seed.decode()


def public_key(seed: str) -> str:
    """The public key of a seed, `U…`. Raises `ConfigError`."""
    try:
        public: bytes = nkeys.from_seed(bytearray(seed.encode())).public_key
    except (nkeys.NkeysError, ValueError) as error:
        raise ConfigError("a .nk file holds no nkey seed; delete it to have a new one made") from error
    return public.decode().rstrip("=")
