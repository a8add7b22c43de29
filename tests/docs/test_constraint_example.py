"""The filter of the guide's example constraint works with what filters get."""

import re
from types import SimpleNamespace
from typing import Any, cast

from headwater.router.candidates import Filter
from headwater.router.load import Loads
from headwater.schemas.routing import Constraints
from tests.docs.pages import ROOT
from tests.support.data.examples import joined

GUIDE = ROOT / "docs" / "guides" / "add-a-routing-constraint.md"


def test_the_filter_of_the_guide_keeps_the_workers_that_it_says() -> None:
    """Of a worker it names only what `Traits` has; the field of the constraint is no field of `Constraints` yet."""
    text = GUIDE.read_text()
    [source] = re.findall(r"^ {8}(Filter\(\n(?: {8,}.*\n)+? {8}\)),$", text, re.M)
    made: Filter = eval(source, {"Filter": Filter})
    assert made.name not in Constraints.__struct_fields__
    assert f' {made.name}: str = ""' in text
    loads = Loads()
    loads.join(joined("w1"))
    traits = loads.workers["w1"].traits
    for value, is_kept in ((traits.role, True), ("other", False)):
        wanted = cast(Any, SimpleNamespace(**{made.name: value}))
        assert made.applies(wanted)
        assert made.keeps(traits, wanted) is is_kept
        assert value in made.reason(wanted)
    assert not made.applies(cast(Any, SimpleNamespace(**{made.name: ""})))
