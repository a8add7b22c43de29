"""Scopes as words: `models:NAME`, `endpoints:NAME` and permissions. The notation of tokens, errors and the command line."""

from collections.abc import Iterable

from headwater.schemas.tables.api_key import PERMISSIONS, Scopes

MODELS = "models:"
ENDPOINTS = "endpoints:"


def parse_scopes(words: Iterable[str]) -> Scopes:
    """The scopes that these words mean. Others are ignored: a token has scopes for other services, too."""
    models: dict[str, None] = {}
    endpoints: dict[str, None] = {}
    permissions: dict[str, None] = {}
    for word in words:
        if word.startswith(MODELS):
            models[word.removeprefix(MODELS)] = None
        elif word.startswith(ENDPOINTS):
            endpoints[word.removeprefix(ENDPOINTS)] = None
        elif word in PERMISSIONS:
            permissions[word] = None
    return Scopes(tuple(models), tuple(endpoints), tuple(permissions))


def write_scopes(scopes: Scopes) -> list[str]:
    """The words of these scopes."""
    models = [MODELS + name for name in scopes.models]
    return models + [ENDPOINTS + name for name in scopes.endpoints] + list(scopes.permissions)
