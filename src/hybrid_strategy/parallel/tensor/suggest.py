"""Rules to start from, for a model that has none."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hybrid_strategy.errors import message


def module_patterns(model: nn.Module) -> dict[str, nn.Module]:
    """Every module's name with `*` for the place in a ModuleList, each pattern once, with the first module it stands for."""
    found: dict[str, nn.Module] = {}
    patterns = {"": ""}
    for name, module in model.named_modules():
        for key in module._modules:
            inner = "*" if isinstance(module, nn.ModuleList) else key
            patterns[f"{name}.{key}".lstrip(".")] = f"{patterns[name]}.{inner}".lstrip(".")
        if name:
            found.setdefault(patterns[name], module)
    return found


def without_rules(model: nn.Module, size: int) -> str:
    """The refusal of a plan without rules: the layers there are, and rules to start from."""
    layers = layers_of(model)
    listed = ", ".join(f"{name} {_shown(layer)}" for name, layer in layers.items()) or "no Linear and no Embedding"
    rules = ", ".join(f'"{name}": "{style}"' for name, style in suggested_rules(layers).items())
    advice = f"Give the model `def parallel_plan(self): return ParallelPlan(tensor={{{rules}}})`, after a look at every word"
    return message(
        "tensor_parallel_size",
        size,
        f"{type(model).__name__} has no tensor-parallel rules",
        f"Its layers: {listed}",
        advice if rules else "Set tensor_parallel_size to 1",
    )


def _shown(layer: nn.Module) -> str:
    if isinstance(layer, nn.Linear):
        return f"Linear({layer.in_features}, {layer.out_features})"
    return f"Embedding({layer.num_embeddings}, {layer.embedding_dim})"


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that a rule could split, by pattern."""
    return {name: each for name, each in module_patterns(model).items() if isinstance(each, nn.Linear | nn.Embedding)}


def suggested_rules(layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """In each sub-block the last Linear is rowwise, those before it are colwise; the last that stands alone is the head.

    A sub-block whose last Linear makes keys or values has its output elsewhere: nothing is said of it.
    """
    blocks: dict[str, list[str]] = {}
    rules: dict[str, str] = {}
    for name, layer in layers.items():
        if isinstance(layer, nn.Embedding):
            rules[name] = "vocab_embedding"
        else:
            blocks.setdefault(name.rpartition(".")[0], []).append(name)
    for block, names in blocks.items():
        if len(names) > 1 and not _makes_heads(names[-1]):
            rules |= {block: "replicate_input"} if block else {}
            rules |= {**dict.fromkeys(names[:-1], "colwise"), names[-1]: "rowwise"}
    alone = [names[0] for names in blocks.values() if len(names) == 1 and "*" not in names[0]]
    return rules | dict.fromkeys(alone[-1:], "vocab_head")


def _makes_heads(name: str) -> bool:
    """Does a Linear of this name make queries, keys or values?"""
    word = name.rpartition(".")[2].lower()
    return word.removesuffix("_proj").removesuffix("_lin") in ("q", "k", "v", "query", "key", "value")
