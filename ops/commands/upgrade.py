"""Commands for upgrades: roll-outs of revisions and policies, and copies of a namespace's streams."""

from typing import Annotated, Literal

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.processes import ClientSettings, PoolCommand
from headwater.ops.config.setting import ConfigError, Flag
from headwater.schemas.routing import PolicyName

SWITCH_NOTES = """\
Each step gives the new revision a share of new requests, and is held. Meanwhile gates compare it with the old one over the requests of
this step, as the logs have them; a gate that fails restores the shares of before, and with too few requests a step is held on. All of it
is in the pool's log, so an interrupted switch goes on with --resume, and `headwater log --audit` lists what was done.

Gates (--gate NAME=LIMIT; default errors=1 ttft_p90=1.5 itl_p90=1.5):

  errors=P      attempts that failed: at most P percentage points more than of the old side
  ttft_pN=F     the N-th percentile of the time to the first token: at most F times the old side's
  itl_pN=F      the N-th percentile of the time between tokens: at most F times the old side's
  answers=S     the share of canned prompts (--prompts) that both answer alike at temperature 0: at least S

For example:

  headwater switch                                           show the shares of revisions
  headwater switch --to vllm-0.31 --canary 5 --hold 10m      5 %, then all
  headwater switch --to-policy lmetric --steps 5,50,100
  headwater rollback

Exit status: 0 if the new side has all requests, 1 if it was rolled back, 2 for what cannot begin."""


Percent = Annotated[
    Annotated[float, Meta(gt=0, le=100)] | None,
    Meta(description="percent of new requests in the first step; the second has all"),
]
Gates = Annotated[
    tuple[str, ...], Flag("gate"), Meta(description="NAME=LIMIT, in place of the default gates; repeatable")
]
CannedPrompts = Annotated[
    str,
    Meta(description="for the gate answers: JSONL file of canned prompts, as `headwater compare` takes them"),
]
CannedUrl = Annotated[
    str,
    Meta(
        description="for the gate answers: URL of an edge whose clients may choose a worker "
        "(default: http://127.0.0.1:8000)"
    ),
]
CannedKey = Annotated[str, Meta(description="for the gate answers: file with the API key for the edge")]
Hold = Annotated[
    str, Meta(description="how long each step is held at least, such as 90s, 10m or 1h (default: 10m)")
]
Samples = Annotated[
    Annotated[int, Meta(ge=1)] | None,
    Meta(description="requests of either side that each gate needs to pass (default: 50)"),
]
ToPolicy = Annotated[
    PolicyName | None, Meta(description="routing policy that is to decide requests which state none")
]
Detach = Annotated[bool, Meta(description="take the first step and end; nothing judges it until --resume")]
ByPolicy = Annotated[
    bool,
    Flag("policy"),
    Meta(description="the split by policy, not by revision: to show, resume, remove or undo"),
]
By = Annotated[str, Meta(description="name for the audit log (default: user@host)")]


@command(defaults={"log.level": "warning"}, notes=SWITCH_NOTES)
async def switch(
    *,
    to: Annotated[str, Meta(description="revision to move requests to (see `headwater ctl list`)")] = "",
    to_policy: ToPolicy = None,
    canary: Percent = None,
    steps: Annotated[str, Meta(description="percent of each step (default: 5,25,100)")] = "",
    hold: Hold = "",
    gates: Gates = (),
    samples: Samples = None,
    prompts: CannedPrompts = "",
    url: CannedUrl = "",
    api_key_file: CannedKey = "",
    resume: Annotated[bool, Meta(description="go on with the roll-out that is under way")] = False,
    remove: Annotated[bool, Meta(description="remove the split: any worker may get any request")] = False,
    detach: Detach = False,
    by_policy: ByPolicy = False,
    by: By = "",
    as_json: Annotated[bool, Flag("json"), Meta(description="print JSON, where shares are shown")] = False,
    settings: PoolCommand,
) -> int:
    """Move requests to another revision of workers, or another routing policy, step by step, judged by the log."""
    from headwater.ops.operator.ctl import whoami
    from headwater.ops.operator.rollout import Canned, Options, Words, ask, run_switch

    target, by = to or str(to_policy or ""), by or whoami()
    if sum(map(bool, (to, to_policy, resume, remove))) > 1:
        raise ConfigError("switch: give one of --to, --to-policy, --resume and --remove")
    if not target and (canary is not None or steps or hold or gates or samples is not None or detach):
        raise ConfigError(
            "switch: --canary, --steps, --hold, --gate, --samples and --detach are for --to REVISION or --to-policy POLICY"
        )
    if (url or api_key_file) and not prompts:
        raise ConfigError("switch: --url and --api-key-file are where --prompts FILE is sent")
    if as_json and (target or resume or remove) and not detach:
        raise ConfigError("switch: --json is for showing the shares, and for --detach")
    subject: Literal["revision", "policy"] = "policy" if to_policy or by_policy else "revision"
    words = Words(canary, steps, hold or "10m", gates, samples or 50, prompts)
    rollout_request = ask(subject, target, words, by) if target else None
    canned = Canned(prompts, url or "http://127.0.0.1:8000", api_key_file)
    options = Options(settings.pool, subject, by, rollout_request, canned, resume, remove, detach, as_json)
    return await run_switch(settings.nats, options)


@command(defaults={"log.level": "warning"})
async def rollback(
    *,
    by_policy: ByPolicy = False,
    reason: Annotated[str, Meta(description="why, for the audit log")] = "",
    by: By = "",
    settings: PoolCommand,
) -> int:
    """Restore the shares of before the last switch, whether it is under way or has ended; what it moved requests to gets none."""
    from headwater.ops.operator.ctl import whoami
    from headwater.ops.operator.rollout import run_rollback

    subject: Literal["revision", "policy"] = "policy" if by_policy else "revision"
    return await run_rollback(settings.nats, settings.pool, subject, by or whoami(), reason)


@command(defaults={"log.level": "warning"})
async def backup(
    *, out: Annotated[str, Meta(description="new folder for the copies")], settings: ClientSettings
) -> int:
    """Copy the namespace's streams to a folder, with every position; a fleet may run meanwhile."""
    from headwater.ops.operator import backup as operator

    return await operator.backup(settings.nats, out)


@command(defaults={"log.level": "warning"})
async def restore(
    folder: Annotated[str, Meta(description="folder of `headwater backup`")],
    /,
    *,
    replicas: Annotated[
        int, Meta(ge=0, le=5, description="servers that keep each stream (default: as they were)")
    ] = 0,
    check: Annotated[bool, Meta(description="only compare the files with their digests")] = False,
    settings: ClientSettings,
) -> int:
    """Make the streams of a backup on a server that has none of them, and verify them."""
    from headwater.ops.operator import backup as operator

    return await operator.restore(settings.nats, folder, replicas=replicas, check=check)
