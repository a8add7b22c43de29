"""Settings of authentication: types, defaults and descriptions only. Light to import: the command line reads them."""

from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta

AuthMode = Literal["none", "keys", "oidc", "keys,oidc"]
HideCachedTokens = Literal["never", "shared", "always"]


class OidcSettings(NamedTuple):
    """Tokens of an OpenID Connect identity provider."""

    issuer: Annotated[str, Meta(description="issuer of accepted tokens, as in their `iss`")] = ""
    audience: Annotated[
        tuple[str, ...],
        Meta(description="audiences of accepted tokens, of which a token's `aud` must contain one"),
    ] = ()
    jwks_url: Annotated[
        str, Meta(description="URL of the issuer's public keys (JWKS); https, or http on loopback")
    ] = ""
    jwks_file: Annotated[
        str, Meta(description="file with the issuer's public keys (JWKS), instead of a URL; read at start")
    ] = ""
    tenant_claim: Annotated[str, Meta(description="claim that names the tenant; required in every token")] = (
        "tenant"
    )
    scopes_claim: Annotated[
        str,
        Meta(
            description="claim with the token's scopes: a list, or words separated by spaces, such as "
            "`models:NAME endpoints:chat tier`; others are ignored"
        ),
    ] = "scope"
    default_scopes: Annotated[
        tuple[str, ...],
        Meta(description="scopes that every token has, such as models:*,endpoints:*; comma-separated"),
    ] = ()


class AccessSettings(NamedTuple):
    """Who may use an edge, and what tenants may learn of each other."""

    mode: Annotated[
        AuthMode,
        Meta(
            description="credentials that the edge accepts: API keys, tokens of an identity provider (OIDC), both, or "
            "none at all, which is possible on a loopback address only"
        ),
    ] = "none"
    hide_cached_tokens: Annotated[
        HideCachedTokens,
        Meta(
            description="when responses omit how much of the prompt was cached: never, always, or for prompts that "
            "tenants share"
        ),
    ] = "shared"
    allow_unsalted_engines: Annotated[
        bool,
        Meta(
            description="serve authenticated tenants by engines without cache salts, where they can detect each "
            "other's prompts"
        ),
    ] = False
    shared_prompts_dir: Annotated[
        str,
        Meta(
            description="folder of system prompts (*.txt) whose cached blocks the tenants share that opted in "
            "(`keys create --cache-sharing`)"
        ),
    ] = ""
    oidc: OidcSettings = OidcSettings()


def check_jwks_url(url: str) -> None:
    """Raises `ValueError` for a URL whose answer could be altered on its way."""
    parts = urlsplit(url)
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and local)):
        raise ValueError(
            "must be an https URL (http on loopback only): a server that can alter the keys can make tokens"
        )
