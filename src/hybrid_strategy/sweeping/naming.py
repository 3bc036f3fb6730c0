"""Names of points: what varies, in a few letters. They are folder names, W&B run names and tags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256

from hybrid_strategy.spec.plan import Plan

_SIZES = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
_LAYOUT = (*_SIZES, "sharding", "sequence_parallel")
"""Keys of `strategy` that `Layout.name` already tells."""

_SHORT = {
    "num_microbatches": "m",
    "micro_batch_size": "mb",
    "stages_per_rank": "v",
    "activation_checkpoint": "ac",
    "data_parallel_replicate_size": "rep",
    "schedule": "",
    "global_batch_size": "bs",
    "base_batch_size": "base",
    "learning_rate": "lr",
    "scaling": "",
    "warmup_steps": "warmup",
    "num_nodes": "nodes",
    "max_steps": "steps",
}
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST = 32


def tags(swept: Mapping[str, str], plan: Plan) -> list[str]:
    """One word for each thing that varies, the layout's own words first.

    >>> from hybrid_strategy.spec.batch import BatchSpec
    >>> from hybrid_strategy.spec.layout import Layout
    >>> plan = Plan(Layout(tensor_parallel_size=2, pipeline_parallel_size=2), BatchSpec(16, num_microbatches=8), 0.1)
    >>> tags({"strategy.tensor_parallel_size": "2", "strategy.num_microbatches": "8", "optimizer.learning_rate": "1e-3"}, plan)
    ['tp2', 'pp2', 'm8', 'lr1e-3']
    """
    keys = [key.lstrip("+") for key in swept]
    told = [key for key in keys if key == "strategy" or key.removeprefix("strategy.") in _LAYOUT]
    words = plan.layout.name.split("_") if told or "cluster.devices" in keys else []
    for key, value in swept.items():
        key = key.lstrip("+")
        if key in told or key == "cluster.devices":
            continue
        own = key.rpartition(".")[2]
        words.append(word(_SHORT.get(own, f"{own}-"), value))
    return [each for each in words if each]


def word(short: str, value: str) -> str:
    """A value as part of a folder's name; what is cut off or replaced is told apart by a few letters of its digest.

    >>> word("lr", "1e-3"), word("", "'a b'"), word("ac", "full")
    ('lr1e-3', 'a-b', 'acfull')
    """
    plain = value.strip("\"'")
    safe = _UNSAFE.sub("-", plain).strip("." if short else "-.")[:_LONGEST]
    if safe == plain or safe == plain.replace(" ", "-"):
        return f"{short}{safe}"
    return (
        f"{short}{safe}-{sha256(plain.encode()).hexdigest()[:6]}" if safe else f"{short}{sha256(plain.encode()).hexdigest()[:6]}"
    )


def unique(names: Sequence[str], swept: Sequence[Mapping[str, str]], taken: Sequence[str] = ()) -> list[str]:
    """The same names, made to differ: by the values that vary where names are equal, else by a number.

    >>> unique(["pp2", "pp2", "tp2"], [{"strategy": "pp2"}, {"strategy": "pp2_gpipe"}, {"strategy": "tp2"}])
    ['pp2_pp2', 'pp2_pp2_gpipe', 'tp2']
    """
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    made: list[str] = []
    used = {each.lower() for each in taken}
    for name, values in zip(names, swept, strict=True):
        if counts[name] > 1:
            alike = [each for other, each in zip(names, swept, strict=True) if other == name]
            differ = [key for key in values if len({each.get(key) for each in alike}) > 1]
            name = "_".join([name, *(word("", values[key]) for key in differ)])
        number, candidate = 2, name
        while candidate.lower() in used:
            candidate, number = f"{name}_{number}", number + 1
        used.add(candidate.lower())
        made.append(candidate)
    return made
