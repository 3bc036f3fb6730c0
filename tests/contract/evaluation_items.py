"""Point 2: validate, test and predict, before and after fit, with last shorter batches and several loaders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.contract.items import Item
from tests.contract.layouts import ContractLayout
from tests.contract.models import Module, loader, make_trainer, row_losses

SIZES = (8, 9, 13, 17, 3, 1)


class Evaluated(Module):
    """Logs and returns what each step sees, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.by_row: dict[str, Any] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, on_epoch=True)
        return loss

    def _step(self, name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.model(batch["ids"])
        losses = row_losses(logits, batch["labels"])
        valid = (batch["labels"] != -100).sum()
        self.log(f"{name}_loss", losses.mean(), on_step=False, on_epoch=True)
        self.log(f"{name}_tokens", losses.sum() * 6 / valid, batch_size=int(valid))
        return {"losses": losses, "row": batch["row"], "mean": losses.mean()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self._step("val", batch)

    def test_step(self, batch: dict[str, Tensor]) -> Any:
        return self._step("test", batch)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._keep("val", outputs)
        self.log("val_hook", outputs["mean"], batch_size=len(batch["row"]))

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._keep("test", outputs)

    def _keep(self, name: str, outputs: Any) -> None:
        if outputs is not None:
            for row, loss in zip(outputs["row"].tolist(), outputs["losses"].tolist(), strict=True):
                self.by_row[f"{name} {self.global_step} {row}"] = loss

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self.model(batch["ids"])
        names = [f"{dataloader_idx}:{row}" for row in batch["row"].tolist()]
        return {"row": batch["row"], "logits": logits[:, -1], "names": names, "pair": (batch["row"] * 2, logits.mean(2))}


def plain(predictions: Any) -> Any:
    if isinstance(predictions, Tensor):
        return predictions.tolist()
    if isinstance(predictions, dict):
        return {key: plain(each) for key, each in predictions.items()}
    return [plain(each) for each in predictions] if isinstance(predictions, (list, tuple)) else predictions


def orders(layout: ContractLayout, folder: str) -> Any:
    """validate -> fit -> test -> predict -> fit -> validate with one trainer and module; weights as if nothing lay between."""
    module, seen = Evaluated(), []
    data = loader(layout, 21)
    trainer = make_trainer(layout, max_epochs=1, num_sanity_val_steps=2)
    seen.append(trainer.validate(module, loader(layout, 13, seed=2), verbose=False))
    trainer.fit(module, data, loader(layout, 9, seed=3))
    seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    seen.append(trainer.test(module, loader(layout, 17, seed=4), verbose=False))
    trainer.predict(module, loader(layout, 5, seed=5))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data)
    seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    seen.append(trainer.validate(module, loader(layout, 13, seed=2), verbose=False))
    return {"seen": seen, "by_row": module.by_row}


def predictions(layout: ContractLayout, folder: str) -> Any:
    module, found = Evaluated(), []
    trainer = make_trainer(layout)
    for size in SIZES:
        found.append(plain(trainer.predict(module, loader(layout, size))))
    found.append(plain(trainer.predict(module, {"one": loader(layout, 9), "two": loader(layout, 5, seed=2)})))
    nothing = trainer.predict(module, loader(layout, 9), return_predictions=False)
    return {"rank_zero": found, "nothing": nothing}


def sizes(layout: ContractLayout, folder: str) -> Any:
    module, seen = Evaluated(), []
    trainer = make_trainer(layout)
    for size in SIZES:
        seen.append(trainer.validate(module, {"rows": loader(layout, size)}, verbose=False))
    limited = make_trainer(layout, limit_test_batches=2)
    seen.append(limited.test(module, loader(layout, 21), verbose=False))
    return {"seen": seen, "by_row": module.by_row}


class TokenWeighted(Module):
    """The loss is a mean over valid tokens, and says over how many."""

    def _loss(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        logits = self.model(batch["ids"])
        tokens = (batch["labels"] != -100).sum()
        loss = row_losses(logits, batch["labels"]).sum() * batch["labels"].shape[1] / tokens
        return {"loss": loss, "num_tokens": tokens}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        found = self._loss(batch)
        self.log("loss", found["loss"])
        return found

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        found = self._loss(batch)
        self.log("val", found["loss"], batch_size=int(found["num_tokens"]))
        self.log("val_step", found["loss"], on_step=True, on_epoch=False)
        return found

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((float(outputs["loss"]), float(self.trainer.callback_metrics["loss"])))


def tokens(layout: ContractLayout, folder: str) -> Any:
    module = TokenWeighted()
    module.seen = []
    trainer = make_trainer(layout, max_epochs=3)
    trainer.fit(module, loader(layout, 21), loader(layout, 13, seed=2))
    final = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"seen": module.seen, "final": final}


class HuggingFace(TokenWeighted):
    """A step that returns a model's output object, as Hugging Face models do."""

    def _loss(self, batch: dict[str, Tensor]) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        logits = self.model(batch["ids"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        output = dict(CausalLMOutput(loss=loss))
        return {**output, "num_tokens": int((batch["labels"] != -100).sum())}


def hugging_face(layout: ContractLayout, folder: str) -> Any:
    module = HuggingFace()
    module.seen = []
    trainer = make_trainer(layout, max_epochs=2)
    trainer.fit(module, loader(layout, 21), loader(layout, 13, seed=2))
    return {"seen": module.seen, "final": {name: float(value) for name, value in trainer.callback_metrics.items()}}


ITEMS = [
    Item("orders_of_evaluation", 2, orders),
    Item("predictions", 2, predictions),
    Item("evaluation_of_any_size", 2, sizes),
    Item("token_weighted_loss", 6, tokens),
    Item("hugging_face_loss", 6, hugging_face),
]
