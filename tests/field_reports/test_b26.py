"""B26, kind of fault: what was evaluated first decides what can be trained later.

Sanity check, validation, test and prediction before, between and after training, in any order and with any schedule, leave
weights, numbers and later steps as they would be without.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from tests.contract.evaluation_items import Evaluated, plain
from tests.contract.items import Item, compare_item
from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.models import LossRecorder, loader, make_trainer

ORDERS = [order for order in permutations(("fit", "validate", "test", "predict")) if order[0] != "fit"][::3]


def orders(layout: ContractLayout, folder: str) -> Any:
    found = {}
    for index, order in enumerate(ORDERS):
        module, losses, seen = Evaluated(), LossRecorder(), []
        trainer = make_trainer(layout, max_epochs=1, num_sanity_val_steps=2 * (index % 2), callbacks=[losses])
        for name in (*order, "validate"):
            data = loader(layout, 13, seed=2)
            if name == "fit":
                trainer.fit(module, loader(layout, 21), data if index % 2 else None)
            elif name == "predict":
                predicted = plain(trainer.predict(module, data))
                seen.append(predicted if trainer.is_global_zero else None)
            else:
                seen.append(getattr(trainer, name)(module, data, verbose=False))
        found[" ".join(order)] = {"losses": losses.losses, "seen": [each for each in seen if trainer.is_global_zero]}
    return {"rank_zero": found}


@pytest.mark.parametrize("layout", ["pp2_1f1b", "pp2_zbv", "dp2_zero3"])
def test_any_order_works(layout: str) -> None:
    """Logits after training differ by the rounding of fp32, 1.3e-6 where it was looked at."""
    result, why = compare_item(Item("b26", 2, orders, relative=1e-5), LAYOUTS[layout])
    assert result == "same", "\n".join(why[:10])
