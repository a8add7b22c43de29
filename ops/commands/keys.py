"""`headwater keys`: API keys of clients."""

from typing import Annotated, Literal

from msgspec import Meta

from headwater.ops.config.command import Json, command, group
from headwater.ops.config.processes import ClientSettings
from headwater.ops.config.setting import Flag
from headwater.schemas.tables import ENDPOINTS, EVERY, PERMISSIONS

NOTES = "\n".join(
    (
        "Endpoints: " + ", ".join(ENDPOINTS) + ".",
        "",
        "Permissions:",
        "",
        *(f"  {name:11} {text}" for name, text in PERMISSIONS.items()),
        "",
        "For example:",
        "",
        "  headwater keys create --tenant acme --name ci --models m-small --expires 90d",
        "  headwater keys create --tenant acme --allow priority,tier --model-limits m-large:requests_per_minute=10",
    )
)

Count = Annotated[int, Meta(ge=0)]


@command(defaults={"log.level": "warning"}, notes=NOTES)
async def create(
    *,
    tenant: Annotated[str, Meta(description="owner of the key: its requests, data and cached prompts")],
    name: Annotated[str, Meta(description="what the key is for, as the list shows it")] = "",
    models: Annotated[
        tuple[str, ...], Meta(description="models that it may use, comma-separated (default: all)")
    ] = (),
    endpoints: Annotated[
        tuple[str, ...], Meta(description="endpoints that it may use, comma-separated (default: all)")
    ] = (),
    allow: Annotated[
        tuple[str, ...], Meta(description="permissions, comma-separated; see below (default: none)")
    ] = (),
    expires: Annotated[str, Meta(description="how long it is valid, such as 90d, 12h, 30m or 60s")] = "",
    requests_per_minute: Annotated[Count, Meta(description="requests per minute; 0: no limit")] = 0,
    tokens_per_minute: Annotated[
        Count, Meta(description="tokens of prompts and outputs per minute; 0: no limit")
    ] = 0,
    concurrent_requests: Annotated[Count, Meta(description="requests in progress; 0: no limit")] = 0,
    context_tokens: Annotated[
        Count, Meta(description="tokens of a prompt with its output; 0: the model's context")
    ] = 0,
    model_limits: Annotated[
        tuple[str, ...],
        Meta(
            description="limits for one model, such as NAME:requests_per_minute=10; comma-separated, repeatable"
        ),
    ] = (),
    cache_sharing: Annotated[
        bool,
        Meta(
            description="share cached prompts with other tenants for the operator's published system prompts"
        ),
    ] = False,
    as_json: Json = False,
    settings: ClientSettings,
) -> int:
    """Create an API key, and print it: it is shown once, only a digest is stored."""
    from headwater.ops.operator import keys as operator
    from headwater.schemas.tables import UsageLimits

    requested_key = operator.WantedKey(
        tenant,
        name,
        operator.words_of(models) or (EVERY,),
        operator.words_of(endpoints) or (EVERY,),
        operator.words_of(allow),
        operator.seconds_of(expires, "--expires") if expires else 0,
        UsageLimits(requests_per_minute, tokens_per_minute, concurrent_requests, context_tokens),
        operator.model_limits_of(operator.words_of(model_limits)),
        cache_sharing,
    )
    return await operator.create(settings.nats, requested_key, as_json=as_json)


@command(defaults={"log.level": "warning"})
async def list_keys(
    *,
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON, one line per key")] = False,
    settings: ClientSettings,
) -> int:
    """List the API keys: ids, tenants, scopes and expiry. Secrets are not known to Headwater."""
    from headwater.ops.operator import keys as operator

    return await operator.show(settings.nats, as_json=as_json)


@command(defaults={"log.level": "warning"})
async def revoke(
    *ids: Annotated[str, Meta(description="ids of keys, as the list shows them")],
    settings: ClientSettings,
) -> int:
    """Revoke API keys: every edge refuses them within a second. Requests in progress are finished."""
    from headwater.ops.operator import keys as operator

    return await operator.revoke(settings.nats, ids)


Limit = Count | None


@command(defaults={"log.level": "warning"}, notes=NOTES.partition("\n\nFor example")[0])
async def update(
    key: Annotated[str, Flag("ID"), Meta(description="id of the key, as the list shows it")],
    /,
    *,
    name: Annotated[str | None, Meta(description="what the key is for, as the list shows it")] = None,
    models: Annotated[
        tuple[str, ...] | None, Meta(description="models that it may use, comma-separated; *: all")
    ] = None,
    endpoints: Annotated[
        tuple[str, ...] | None, Meta(description="endpoints that it may use, comma-separated; *: all")
    ] = None,
    allow: Annotated[
        tuple[str, ...] | None, Meta(description="permissions, comma-separated; see below; none: none")
    ] = None,
    expires: Annotated[
        str | None, Meta(description="how long it is valid from now on, such as 90d; never: without expiry")
    ] = None,
    requests_per_minute: Annotated[Limit, Meta(description="requests per minute; 0: no limit")] = None,
    tokens_per_minute: Annotated[
        Limit, Meta(description="tokens of prompts and outputs per minute; 0: no limit")
    ] = None,
    concurrent_requests: Annotated[Limit, Meta(description="requests in progress; 0: no limit")] = None,
    context_tokens: Annotated[
        Limit, Meta(description="tokens of a prompt with its output; 0: the model's context")
    ] = None,
    model_limits: Annotated[
        tuple[str, ...] | None,
        Meta(description="limits for single models, in the place of the present ones; none: none"),
    ] = None,
    cache_sharing: Annotated[
        Literal["on", "off"] | None,
        Meta(description="share cached prompts for the operator's published system prompts"),
    ] = None,
    as_json: Json = False,
    settings: ClientSettings,
) -> int:
    """Change what an API key may do: every edge knows within a second. Options that are not given stay as they are.

    Its secret and its tenant stay.
    """
    from headwater.ops.operator import keys as operator

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "context_tokens": context_tokens,
    }
    changes = operator.KeyChanges(
        name,
        operator.words_or_none(models),
        operator.words_or_none(endpoints),
        operator.words_or_none(allow),
        operator.seconds_or_never(expires, "--expires"),
        {limit: number for limit, number in limits.items() if number is not None},
        operator.model_limits_or_none(model_limits),
        None if cache_sharing is None else cache_sharing == "on",
    )
    return await operator.update(settings.nats, key, changes, as_json=as_json)


@command(defaults={"log.level": "warning"})
async def rotate(
    key: Annotated[str, Flag("ID"), Meta(description="id of the key, as the list shows it")],
    /,
    *,
    grace: Annotated[
        str, Meta(description="how long the present secret stays valid, such as 24h; 0s: not at all")
    ] = "24h",
    as_json: Json = False,
    settings: ClientSettings,
) -> int:
    """Give an API key a new secret, and print it. Its id, tenant, scopes and limits stay."""
    from headwater.ops.operator import keys as operator

    grace_s = operator.seconds_of(grace, "--grace")
    return await operator.rotate(settings.nats, key, grace_s, as_json=as_json)


keys = group("keys", None, create=create, list=list_keys, update=update, revoke=revoke, rotate=rotate)
