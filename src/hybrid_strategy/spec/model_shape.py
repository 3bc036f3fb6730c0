"""The shape of a decoder-only transformer, in Hugging Face's words: all that planning needs to know of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a transformer. `gated_mlp`: three MLP matrices (SwiGLU) instead of two.

    >>> ModelShape(hidden_size=4096, num_layers=32, num_attention_heads=32, num_key_value_heads=8,
    ...            intermediate_size=14336, vocab_size=128256, sequence_length=8192).num_parameters
    8030261248
    """

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    sequence_length: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    family: str = "llama"
    gated_mlp: bool = True
    tied_embeddings: bool = False
    bias: bool = False
    learned_positions: bool = False

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block: attention, MLP, two norms (biases where `bias`)."""
        h, f = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_size, self.kv_heads * self.head_size
        attention = h * q + 2 * h * kv + q * h
        mlp = (3 if self.gated_mlp else 2) * h * f
        norms = 2 * h
        if self.bias:
            attention += q + 2 * kv + h
            mlp += f + h
            norms *= 2
        return attention + mlp + norms

    @property
    def embedding_parameters(self) -> int:
        """Token embedding and, where learned, positions."""
        positions = self.sequence_length * self.hidden_size if self.learned_positions else 0
        return self.vocab_size * self.hidden_size + positions

    @property
    def head_parameters(self) -> int:
        """Final norm and output head (the head costs nothing where it is tied)."""
        norm = self.hidden_size * (2 if self.bias else 1)
        return norm + (0 if self.tied_embeddings else self.vocab_size * self.hidden_size)

    @property
    def num_parameters(self) -> int:
        return self.embedding_parameters + self.num_layers * self.layer_parameters + self.head_parameters
