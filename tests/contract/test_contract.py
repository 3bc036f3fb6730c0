"""Whatever one process sees, every layout sees; what a layout cannot do, it refuses on every rank.

Each item is tried here in two layouts, so that every layout meets many items; `make contract` prints all of the matrix.
"""

from __future__ import annotations

import os

import pytest

from tests.contract.items import all_items, compare
from tests.contract.layouts import LAYOUTS

ALL = list(LAYOUTS)
CASES = [
    (item, ALL[place % len(ALL)])
    for index, item in enumerate(all_items())
    for place in (range(len(ALL)) if os.environ.get("CONTRACT_ALL") else (3 * index, 3 * index + 5))
]


@pytest.mark.parametrize(("item", "layout"), CASES)
def test_layout_sees_what_one_process_sees(item: str, layout: str) -> None:
    result, why = compare(item, layout)
    assert result != "different", "\n".join(why[:20])


def test_every_layout_is_tried() -> None:
    assert {layout for _, layout in CASES} == set(ALL)
