"""Out to Hugging Face and back in: the logits there beside ours, the weights that come back bit for bit.

    python benchmarks/export_round_trip.py [--only TEXT] [--json FILE]

Each family, with and without tied embeddings, is trained two steps in a layout and exported with `hybrid export` as a sharded
folder. `transformers` loads the folder; its logits are compared with those of our own whole model. Then the folder is where a run
in another layout begins, whose weights, exported again, must be the same bits. Needs `transformers`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lightning.pytorch as pl
import torch
from grid_pool import Pool
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.cli.main import main as command
from hybrid_strategy.modules.language_model import LanguageModel
from hybrid_strategy.registry import parts
from hybrid_strategy.spec.model_shape import ModelShape

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "dp2_zero3": (2, {"sharding": "zero3"}),
}
BOUND = 1e-6


class Found(NamedTuple):
    """What came out of one round trip.

    Attributes:
        apart: largest difference of two logits.
        shards: files of weights in the folder.
        wrong: names of weights that came back as others.
    """

    apart: float
    shards: int
    wrong: list[str]

    @property
    def right(self) -> bool:
        return self.apart <= BOUND and not self.wrong


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Eight random rows."""

    def __init__(self, shape: ModelShape) -> None:
        size = (8, shape.sequence_length + 1)
        self.rows = torch.randint(0, shape.vocab_size, size, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index, :-1], "labels": self.rows[index, 1:]}


def shapes() -> dict[str, ModelShape]:
    """Name -> a tiny model of a family; GPT-2 knows no grouped queries."""
    tiny = {name: part.tiny for name, part in parts("models").items() if part.exchange}
    tiny["gpt"] = replace(tiny["gpt"], num_key_value_heads=tiny["gpt"].num_attention_heads)
    untied = {name: replace(shape, tied_embeddings=False) for name, shape in tiny.items()}
    return {**untied, **{f"{name}_tied": replace(shape, tied_embeddings=True) for name, shape in untied.items()}}


def save(shape: ModelShape, devices: int, strategy: dict[str, Any], path: str) -> None:
    """Trains two steps, or only begins where the strategy is given weights, and saves."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        max_steps=2,
        strategy=HybridParallelStrategy(**strategy),
        enable_model_summary=False,
        **quiet,
    )
    module, loader = LanguageModel(shape), DataLoader(Rows(shape), batch_size=2)
    if "initial_weights" in strategy:
        trainer.validate(module, loader, verbose=False)
    else:
        trainer.fit(module, loader)
    trainer.save_checkpoint(path)


def export(checkpoint: Path, out: Path, *more: str) -> None:
    """`hybrid export`, without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = command(["export", str(checkpoint), str(out), *more])
    if code:
        raise RuntimeError(f"hybrid export ended with {code}: {said.getvalue()}")


def logits(shape: ModelShape, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Those of our whole model."""
    model = parts("models")[shape.family].build(shape)
    model.load_state_dict({name.removeprefix("model."): each for name, each in weights.items()}, strict=False)
    with torch.no_grad():
        return model.eval()(Rows(shape).rows[:, :-1])


def round_trip(pool: Pool, shape: ModelShape, layout: str, back: str, folder: Path) -> Found:
    """Trains in `layout`, goes out, comes back in `back`."""
    import transformers

    (devices, strategy), (others, other) = LAYOUTS[layout], LAYOUTS[back]
    pool.run(save, devices, shape, devices, strategy, str(folder / "trained"), timeout=120)
    export(folder / "trained", folder / "own.safetensors", "--names", "own")
    export(folder / "trained", folder / "hf", "--shard-size", "8KB")
    own = load_file(folder / "own.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    with torch.no_grad():
        apart = (theirs(input_ids=Rows(shape).rows[:, :-1]).logits - logits(shape, own)).abs().max().item()
    given = {**other, "initial_weights": str(folder / "hf")}
    pool.run(save, others, shape, others, given, str(folder / "back"), timeout=120)
    export(folder / "back", folder / "back.safetensors", "--names", "own")
    again = load_file(folder / "back.safetensors")
    wrong = sorted(own.keys() ^ again.keys()) + [
        name for name in own.keys() & again.keys() if not torch.equal(own[name], again[name])
    ]
    return Found(apart, len(list((folder / "hf").glob("*.safetensors"))), wrong)


def run(only: str) -> dict[str, Found]:
    """Name of the round trip -> what came out; prints a line for each."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    names, pool, found = list(LAYOUTS), Pool(), {}
    try:
        for shape_name, shape in shapes().items():
            for index, layout in enumerate(names):
                back = names[(index + 1) % len(names)]
                name = f"{shape_name} {layout} -> {back}"
                if only not in name:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    each = found[name] = round_trip(pool, shape, layout, back, Path(folder))
                print(
                    f"{name:<32} logits {each.apart:.1e} apart, {each.shards} files, {each.wrong or 'the same weights'}",
                    flush=True,
                )
    finally:
        pool.close()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the round trips."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="those whose name has this in it")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    given = parser.parse_args(argv)
    found = run(given.only)
    apart, right = max((each.apart for each in found.values()), default=0.0), sum(each.right for each in found.values())
    print(f"{right} of {len(found)} round trips right, logits at most {apart:.1e} apart (bound {BOUND:.0e})")
    if given.json:
        figures = [
            {"name": "round trips right", "value": right, "unit": "round trips", "goal": f"{len(found)}"},
            {"name": "logits apart", "value": apart, "unit": "", "goal": f"<= {BOUND:.0e}"},
        ]
        Path(given.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return 0 if found and right == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
