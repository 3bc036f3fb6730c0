"""From clues to a cause in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from hybrid_strategy.parity.clues import Clue
from hybrid_strategy.spec.layout import Layout

_NEAR = 1e-3
_SHOWN = 3

_TIMES = {
    "num_microbatches": "micro-batches are summed where their mean is right",
    "tensor_parallel_size": "what every tensor-parallel rank holds whole is summed over them",
    "data_parallel_size": "data-parallel ranks are summed where their mean is right",
    "accumulate_grad_batches": "accumulated batches are summed where their mean is right",
    "context_parallel_size": "what every context-parallel rank holds whole is summed over them",
    "pipeline_parallel_size": "what every pipeline rank holds whole is summed over them",
}
_OVER = {
    "num_microbatches": "the mean over micro-batches is taken twice, or of losses that are sums over their rows",
    "tensor_parallel_size": "parts of a sum over the tensor-parallel ranks are averaged, or never summed",
    "data_parallel_size": "the mean over data-parallel ranks is taken twice, or of losses that are sums over their rows",
    "accumulate_grad_batches": "the mean over accumulated batches is taken twice",
    "context_parallel_size": "parts of a sum over the context-parallel ranks are averaged, or never summed",
    "pipeline_parallel_size": "parts of a sum over the pipeline ranks are averaged, or never summed",
}


def factors_of(layout: Layout, num_microbatches: int, accumulate: int) -> dict[str, int]:
    """The numbers of a run that a wrong factor may come from."""
    sizes = {
        "num_microbatches": num_microbatches,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "data_parallel_size": layout.data_parallel_size,
        "accumulate_grad_batches": accumulate,
        "context_parallel_size": layout.context_parallel_size,
        "pipeline_parallel_size": layout.pipeline_parallel_size,
    }
    return {name: size for name, size in sizes.items() if size > 1}


def explain_ratio(ratio: float, factors: Mapping[str, int]) -> list[str]:
    """What a factor of `ratio` may come from, one number of the run or a product of two.

    >>> explain_ratio(4.0, {"num_microbatches": 4, "data_parallel_size": 2})
    ['x num_microbatches (4): micro-batches are summed where their mean is right']
    >>> explain_ratio(0.125, {"num_microbatches": 4, "data_parallel_size": 2})
    ['/ (num_microbatches x data_parallel_size) (4 x 2)']
    """
    found = [f"x {name} ({size}): {_TIMES[name]}" for name, size in factors.items() if _near(ratio, size)]
    found += [f"/ {name} ({size}): {_OVER[name]}" for name, size in factors.items() if _near(ratio, 1 / size)]
    if found:
        return found
    for (name, size), (other, more) in combinations(factors.items(), 2):
        found += [f"x {name} x {other} ({size} x {more})"] if _near(ratio, size * more) else []
        found += [f"/ ({name} x {other}) ({size} x {more})"] if _near(ratio, 1 / (size * more)) else []
    return found


def diagnose(what: str, clues: Sequence[Clue], num_tensors: int, factors: Mapping[str, int]) -> list[str]:
    """Causes, the surest first; empty where no pattern is seen.

    Args:
        what: what the tensors are: `gradients`, `weights`, ...
        clues: the tensors that differ at the first step where any does.
        num_tensors: how many were compared.
        factors: see `factors_of`.
    """
    rest = list(clues)
    found: list[str] = []
    for rule in (_absent, _described, _apart, _scaled, _one_rank):
        sentences, rest = rule(what, rest, num_tensors, factors)
        found += sentences
    return found


Found = tuple[list[str], list[Clue]]


def _absent(what: str, clues: list[Clue], num_tensors: int, factors: Mapping[str, int]) -> Found:
    """Tensors that are not there, nothing but zeros, or there in the layout only."""
    gone, zero = [each for each in clues if each.absent], [each for each in clues if each.zero]
    extra = [each for each in clues if each.extra]
    found = []
    if extra:
        found.append(f"extra: the layout has {what} of {_names(extra)}, one process has none")
    if gone:
        ranks = sorted({rank for each in gone for rank in each.wrong_ranks})
        where = f" on {_ranks(ranks)}" if ranks else " on any rank"
        found.append(f"absent: {_names(gone)} {_has(gone)} no {what}{where}; a layer was left out or took no part in the step")
    if zero:
        found.append(f"zero: the {what} of {_names(zero)} are all 0; the layer took no part in the step")
    return found, [each for each in clues if not (each.absent or each.zero or each.extra)]


def _described(what: str, clues: list[Clue], num_tensors: int, factors: Mapping[str, int]) -> Found:
    """Tensors of another type, and elements that no rank or several ranks count as theirs."""
    groups: dict[str, list[Clue]] = {}
    for each in clues:
        if each.dtypes is not None:
            groups.setdefault(f"type: {{}} {{}} {each.dtypes[0]} where one process has {each.dtypes[1]}", []).append(each)
        elif each.owners is not None:
            least, most = each.owners
            number = str(most) if least == most else f"{least} to {most}"
            text = f"owners: elements of {{}} {{}} {number} owners; each must be written and counted in the norm once"
            groups.setdefault(text, []).append(each)
    found = [
        text.format(_names(members), _has(members) if text.startswith("owners") else _is(members))
        for text, members in groups.items()
    ]
    return found, [each for each in clues if each.dtypes is None and each.owners is None]


def _apart(what: str, clues: list[Clue], num_tensors: int, factors: Mapping[str, int]) -> Found:
    """Copies that have come apart, by axis and by what would mend them."""
    groups: dict[tuple[tuple[str, ...], bool, bool], list[Clue]] = {}
    for each in clues:
        if each.apart:
            groups.setdefault((each.apart, each.sum_is_right, each.mean_is_right), []).append(each)
    found = []
    for (axes, summed, averaged), members in groups.items():
        axis = " and ".join(axes)
        text = f"unsynchronised replica: {axis} ranks hold different {what} of {_names(members)}"
        if summed:
            text += f"; their sum is right, so an all-reduce over the {axis} ranks is missing"
        elif averaged:
            text += f"; their mean is right, so averaging over the {axis} ranks is missing"
        elif _same_ranks(members):
            text += f"; wrong on {_ranks(members[0].wrong_ranks)} only"
        found.append(text)
    return found, [each for each in clues if not each.apart]


def _scaled(what: str, clues: list[Clue], num_tensors: int, factors: Mapping[str, int]) -> Found:
    """Tensors that are right but for a factor."""
    groups: list[list[Clue]] = []
    for each in clues:
        if each.constant and each.ratio is not None:
            known = next((group for group in groups if _near(each.ratio, group[0].ratio or 0.0)), None)
            groups.append([each]) if known is None else known.append(each)
    found = []
    for group in groups:
        ratio = group[0].ratio or 0.0
        who = f"all {what}" if len(group) == num_tensors else f"the {what} of {_names(group)}"
        causes = explain_ratio(ratio, factors) or [f"no size of the run is {ratio:.6g} or 1/{ratio:.6g}"]
        found += [f"scaled: {who} are x {ratio:.6g}, {cause}" for cause in causes]
    grouped = {each.name for group in groups for each in group}
    return found, [each for each in clues if each.name not in grouped]


def _one_rank(what: str, clues: list[Clue], num_tensors: int, factors: Mapping[str, int]) -> Found:
    """Blocks that are wrong on some ranks only."""
    groups: dict[tuple[int, ...], list[Clue]] = {}
    for each in clues:
        if each.wrong_ranks:
            groups.setdefault(each.wrong_ranks, []).append(each)
    found = [
        f"part of the ranks: the {what} of {_names(members)} are wrong on {_ranks(ranks)} only"
        for ranks, members in groups.items()
    ]
    return found, [each for each in clues if not each.wrong_ranks]


def _same_ranks(clues: Sequence[Clue]) -> bool:
    return bool(clues[0].wrong_ranks) and len({each.wrong_ranks for each in clues}) == 1


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= _NEAR * abs(other)


def _names(clues: Sequence[Clue]) -> str:
    shown = ", ".join(each.name for each in clues[:_SHOWN])
    return shown if len(clues) <= _SHOWN else f"{shown} and {len(clues) - _SHOWN} more"


def _is(clues: Sequence[Clue]) -> str:
    return "is" if len(clues) == 1 else "are"


def _has(clues: Sequence[Clue]) -> str:
    return "has" if len(clues) == 1 else "have"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
