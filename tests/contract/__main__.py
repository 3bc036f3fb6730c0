"""Prints the contract's table: item x layout, same / refused / different.

`python -m tests.contract [item, number of a point or "all"] [layout]`
"""

from __future__ import annotations

import sys

from tests.contract.items import all_items, compare
from tests.contract.layouts import LAYOUTS

_SHORT = {"same": "same", "refused": "refused", "different": "DIFFERENT"}


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    items = [name for name, item in all_items().items() if not arguments or arguments[0] in (str(item.point), name, "all")]
    layouts = [name for name in LAYOUTS if len(arguments) < 2 or arguments[1] == name]
    width = max(len(name) for name in items) + 3
    show(" " * (width + 1) + "".join(f"{name:<17}" for name in layouts) + "\n")
    explanations: list[str] = []
    for name in items:
        show(f"{all_items()[name].point}  {name:<{width - 3}} ")
        for layout in layouts:
            try:
                result, why = compare(name, layout)
            except AssertionError as error:
                result, why = "different", [str(error)[-6000:]]
            show(f"{_SHORT[result]:<17}")
            if result != "same":
                explanations.append(f"{name} in {layout}: {result}\n    " + "\n    ".join(why[:12]))
        show("\n")
    show("\n" + "\n".join(explanations) + "\n")
    return int(any(": different\n" in each for each in explanations))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
