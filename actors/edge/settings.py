"""Settings of the edge: types, defaults and descriptions only. Light to import: the command line reads them."""

from typing import Annotated, Final, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Meta

from headwater.events.table import STORED_BYTES_MAX
from headwater.schemas.events import EncodeLegs, PayloadKind
from headwater.schemas.routing import CLIENT_POLICIES

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
        str,
        Meta(
            description="URL of the issuer's public keys (JWKS): https, http on loopback, or file:///PATH, which is read at start"
        ),
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


def jwks_path(url: str) -> str:
    """The path of a file: URL of this machine, "" of another URL. Raises `ValueError` for one that is no URL, or names no file."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return ""
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or path.endswith("/"):
        raise ValueError("must be file:///PATH, with the whole path of a file of this machine")
    return path


def check_jwks_url(url: str) -> None:
    """Raises `ValueError` for a URL whose answer could be altered on its way."""
    parts = urlsplit(url)
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and local)):
        raise ValueError(
            "must be an https URL (http on loopback only) or file:///PATH: a server that can alter the keys can make tokens"
        )


# Rate limits.

_PER = "of one API key, or of one tenant without keys; a key's own limit replaces it; 0: unlimited"


class RateLimits(NamedTuple):
    """Limits of one holder of limits. 0 is unlimited."""

    requests_per_minute: Annotated[int, Meta(ge=0, description="requests per minute")] = 0
    tokens_per_minute: Annotated[int, Meta(ge=0, description="prompt and generated tokens per minute")] = 0
    concurrent_requests: Annotated[int, Meta(ge=0, description="requests in flight")] = 0
    context_tokens: Annotated[
        int, Meta(ge=0, description="tokens of the prompt and the answer of one request")
    ] = 0

    @property
    def any_rate(self) -> bool:
        """True if anything must be counted."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent_requests)


UNLIMITED: Final = RateLimits()

REQUEST_TIMEOUT_S: Final = 3600.0


# Limits of clients.

ReasoningField = Literal["both", "reasoning_content", "reasoning"]
"""The name of reasoning in OpenAI's chat completions: that of DeepSeek and SGLang, that of vLLM, or both."""

HostedTools = Literal["omit", "reject"]
"""What is done with tools that an API's own servers would run."""


class ClientLimits(NamedTuple):
    """What clients may ask for, in routing and in number of choices."""

    policies: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            description="routing policies that a request may name (x-headwater-policy), comma-separated; empty: none"
        ),
    ] = CLIENT_POLICIES
    temperature_max: float = 1.0
    """Maximum routing temperature that a request may ask for (x-headwater-router-temperature)."""
    choices_max: Annotated[
        int, msgspec.Meta(ge=1, le=128, description="maximum choices of one prompt (n, best_of)")
    ] = 128


# Stored responses.


class HistorySettings(NamedTuple):
    """What the edge stores for `/v1/responses`, `/v1/conversations` and image URLs, and how long a connection lasts."""

    store: Annotated[
        bool,
        Meta(
            description="store responses and conversations, with their prompts and answers, for clients that refer "
            "to them (Responses API); off: nothing is stored, and `store: true` is ignored"
        ),
    ] = True
    ttl_s: Annotated[
        int, Meta(ge=1, description="seconds after which a stored response or conversation item expires")
    ] = 72 * 3600
    tenant_bytes_max: Annotated[
        int,
        Meta(
            ge=0,
            description="maximum bytes of what one tenant has stored; beyond it its own oldest objects are discarded; "
            "0: no bound of its own. Without authentication there is one tenant, and no such bound",
        ),
    ] = STORED_BYTES_MAX // 4
    image_ttl_s: int = 3600
    """Seconds after which a generated image that has a URL expires."""
    connection_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds after which a WebSocket of the Responses API is closed, once it is idle",
        ),
    ] = 3600.0


# Video jobs.


class VideoSettings(NamedTuple):
    """How many videos a tenant may have generated at once, how long that may take, and how long the results are kept."""

    jobs_max: int = 16
    """Video jobs of one tenant that have not ended; one more is refused; 0: no bound."""
    timeout_s: int = 7200
    """Seconds after which a video job that has not completed fails, its time in queues included."""
    ttl_s: int = 24 * 3600
    """Seconds after which a video that is completed, or failed, expires."""


# All of an edge, apart from what it listens on, its media and its clients' credentials.


class EdgeSettings(NamedTuple):
    """What clients may ask for, and what of their requests is recorded."""

    record_payloads: Annotated[
        PayloadKind,
        Meta(
            description="what of prompts and outputs the request log contains: off, hashed (SHA-256) or full"
        ),
    ] = "off"
    allow_special_tokens_in_text: Annotated[
        bool,
        Meta(description="control tokens spelled in clients' messages act as control tokens, not as text"),
    ] = False
    reasoning_field: Annotated[
        ReasoningField,
        Meta(
            description="name of reasoning in chat completions: reasoning_content, reasoning, or both, with the text twice"
        ),
    ] = "both"
    hosted_tools: Annotated[
        HostedTools,
        Meta(
            description="tools that OpenAI's or Anthropic's own servers would run (web search, MCP, …): omit them from the prompt, or reject the request"
        ),
    ] = "omit"
    encode_legs: Annotated[
        EncodeLegs,
        Meta(
            description="which images go to encode workers: estimate (where that is expected to be faster), always (where one takes it) or never"
        ),
    ] = "estimate"
    metrics_tenants: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="tenants whose requests and tokens are metrics of their own, the first so many that an edge sees; further ones count together; 0: none",
        ),
    ] = 0
    client: ClientLimits = ClientLimits()
    limit: Annotated[RateLimits, Meta(description=f"limits {_PER}")] = RateLimits()
    request_timeout_s: Annotated[
        float,
        Meta(ge=0, description="time limit of a request until the end of its answer, in seconds; 0: none"),
    ] = REQUEST_TIMEOUT_S
    history: Annotated[
        HistorySettings,
        Meta(description="what is stored for the Responses API, where it differs from the defaults"),
    ] = HistorySettings()
    videos: VideoSettings = VideoSettings()
