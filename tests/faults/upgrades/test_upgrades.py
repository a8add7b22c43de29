"""Upgrades under load, in `make soak`: of every process to another build and back, and of the NATS servers."""

from pathlib import Path

import pytest

from tests.faults.upgrades.releases import BEFORE, Release, build, missing
from tests.faults.upgrades.rolling_upgrade import rolling_upgrade
from tests.faults.upgrades.servers_replaced import servers_replaced

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The build of the commit before."""
    if reason := missing():
        pytest.skip(reason)
    return build(BEFORE, tmp_path_factory.mktemp("before"))


async def test_an_upgrade_and_its_reversal_fail_no_request(tmp_path: Path, before: Release) -> None:
    """From the build of the commit before to this one, and back: each process once, and both builds read the log."""
    report = await rolling_upgrade(tmp_path, before, Release("this build"))
    report.check()


async def test_the_other_order_fails_no_request(tmp_path: Path, before: Release) -> None:
    """A fleet of this build that becomes one of the build before, and is upgraded with the workers first."""
    report = await rolling_upgrade(tmp_path, Release("this build"), before)
    report.check()


@pytest.mark.parametrize("emptied", [False, True], ids=["restarted", "replaced"])
async def test_nats_servers_one_by_one_fail_no_request(tmp_path: Path, emptied: bool) -> None:
    """Each of three, while the other two have the quorum."""
    report = await servers_replaced(tmp_path, emptied=emptied)
    report.check()
