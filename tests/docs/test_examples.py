"""What no command block runs: issue templates."""

import yaml

from tests.docs.pages import ROOT


def test_issue_templates_are_yaml() -> None:
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        assert yaml.safe_load(path.read_text())
