"""A hub and a site as `headwater nats-config` writes their configuration: two real servers, the site's a leaf node of the hub's."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from headwater.ops.config.sections import NatsSettings
from headwater.ops.nats.config import Auth, Wanted, write
from headwater.ops.start.sockets import free_port
from tests.support.servers.nats import NatsServer

SITE = "site-a"
HUB = "hub"


class Sites(NamedTuple):
    """Both servers, and the folders of their keys, empty without any."""

    hub: NatsServer
    site: NatsServer
    hub_keys: str
    site_keys: str

    @property
    def there(self) -> NatsSettings:
        """How processes of the site reach its server."""
        return NatsSettings(self.site.url, namespace=SITE, keys_dir=self.site_keys)

    def here(self, namespace: str = SITE) -> NatsSettings:
        """How commands reach a namespace at the hub."""
        return NatsSettings(self.hub.url, namespace=namespace, keys_dir=self.hub_keys)


@asynccontextmanager
async def hub_and_site(folder: Path, auth: Auth = "nkey") -> AsyncIterator[Sites]:
    """Both run; either may be killed and restarted."""
    hub_port, site_port, leaf_port = free_port(0), free_port(0), free_port(0)
    keys = [folder / name for name in (HUB, SITE)]
    for one in keys:
        one.mkdir()
    at_hub = Wanted(
        HUB, auth, port=hub_port, store=str(folder / "hub-js"), sites=(SITE,), leaf_port=leaf_port
    )
    write(at_hub, keys[0])
    if auth != "none":
        shutil.copy(keys[0] / "leaf.password", keys[1])
    at_site = Wanted(
        SITE, auth, port=site_port, store=str(folder / "site-js"), hub=(f"127.0.0.1:{leaf_port}",)
    )
    write(at_site, keys[1])
    hub = NatsServer(folder / HUB, port=hub_port, config=keys[0] / "nats.conf")
    site = NatsServer(folder / SITE, port=site_port, config=keys[1] / "nats.conf")
    try:
        await hub.start()
        await site.start()
        yield Sites(hub, site, *("" if auth == "none" else str(one) for one in keys))
    finally:
        hub.stop()
        site.stop()
