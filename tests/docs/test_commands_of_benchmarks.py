"""As `test_commands`, on a fleet of their own: pages whose commands teach routers how long prefills take."""

import pytest

from tests.docs.conftest import Shell
from tests.docs.pages import ROOT
from tests.docs.test_commands import TEACHING, run_page

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("docs")]


@pytest.mark.parametrize("page", sorted(TEACHING))
def test_commands_print_what_the_page_shows(page: str, shell: Shell) -> None:
    run_page(ROOT / page, shell)
