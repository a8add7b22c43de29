"""Variables of the environment that begin with `HEADWATER_`: settings, our own, those of Kubernetes, and unknown ones."""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Final

from headwater.ops.config.setting import ENV_PREFIX
from headwater.ops.config.tree import all_settings, nearest_key

CONFIG_VARIABLE, KEY_VARIABLE = f"{ENV_PREFIX}CONFIG", f"{ENV_PREFIX}CONFIG_KEY"

OWN: Final = frozenset(
    {
        CONFIG_VARIABLE,
        KEY_VARIABLE,
        *(
            f"{ENV_PREFIX}{name}"
            for name in (
                "ENVIRONMENT_OF",
                "FIRST_FAILURE",
                "EMBEDDINGS_FOLDER",
                "STALLS",
                "STALLS_FREEZES",
                "TEST_INSIDE",
            )
        ),
    }
)
"""What processes of Headwater pass on to others, and the two that are no setting."""

_SERVICE = re.compile(
    r"_SERVICE_HOST\Z|_SERVICE_PORT(_\w+)?\Z|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?\Z"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)


def is_of_a_service(variable: str, text: str) -> bool:
    """Has Kubernetes set it, as it does in each pod for each service of the namespace? One named `headwater` gives HEADWATER_PORT."""
    return bool(_SERVICE.search(variable)) or (variable.endswith("_PORT") and bool(_SERVICE_URL.match(text)))


def is_unset(variable: str, text: str) -> bool:
    """Does it give no value? Templates write empty variables where they have none."""
    return not text or is_of_a_service(variable, text)


def unknown(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that no setting has, each with the one that was most likely meant, "" without any."""
    known = {one.variable: key for key, one in all_settings().items()}
    for name, text in sorted(environ.items()):
        is_known = name in known or name in OWN or is_of_a_service(name, text)
        if name.startswith(ENV_PREFIX) and not is_known:
            yield name, _meant(name, known)


def _meant(variable: str, known: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
    if near:
        return near[0]
    # By a key of a file, as http.port, or with a word too many, as HEADWATER_NATS_URL.
    words = variable.removeprefix(ENV_PREFIX).lower()
    section, _, name = words.partition("_")
    key = nearest_key(f"{section}.{name}") if name else None
    if key in all_settings():
        return all_settings()[key].variable
    shorter = variable.rpartition("_")[0]
    return shorter if shorter in known else ""
