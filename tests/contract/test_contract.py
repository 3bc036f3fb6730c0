"""Whatever one process sees, every layout sees; what a layout cannot do, it refuses on every rank."""

from __future__ import annotations

import pytest

from tests.contract.items import all_items, compare
from tests.contract.layouts import LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("item", all_items())
def test_layout_sees_what_one_process_sees(item: str, layout: str) -> None:
    result, why = compare(item, layout)
    assert result != "different", "\n".join(why[:20])
