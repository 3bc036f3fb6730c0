"""Models of Hugging Face as they are: masks of padding, labels shifted by the model, a cache of keys in every layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.context_models import VOCAB, WIDTH, Outcome, one_step
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="sdpa"))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none, attn_implementation="sdpa"))


class Logits(nn.Module):
    """A model that returns logits alone, for the comparison after training."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids).logits


def own_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model.inner(input_ids=ids, labels=ids).loss


def padded_loss(model: nn.Module, ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    return model.inner(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2}
LOSSES = {"whole": own_loss, "padded": padded_loss}


def all_here(size: int) -> dict[tuple[str, str], Outcome]:
    return {
        (model, loss): one_step(lambda build=build: Logits(build()), loss_of, size)
        for model, build in MODELS.items()
        for loss, loss_of in LOSSES.items()
    }


def test_same_numbers_as_one_process() -> None:
    (wanted,) = run_ranks(all_here, 1, 1)
    for got in run_ranks(all_here, 2, 2):
        for key, want in wanted.items():
            have = got[key]
            assert have.loss == pytest.approx(want.loss, rel=1e-6), key
            torch.testing.assert_close(have.logits, want.logits, rtol=1e-5, atol=1e-5)
            scale = max(each.abs().max().item() for each in want.gradients.values())
            for name, value in want.gradients.items():
                torch.testing.assert_close(have.gradients[name], value, rtol=0, atol=1e-5 * scale)
