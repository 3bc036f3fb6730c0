"""Rows of published measurements -> scenarios of the planner.

What a row leaves open is filled by rules that hold for every source (below); `assumed` says what was filled. Whatever is not a
layout (stack, attention kernel, network) is read off the software named in the row, never fitted to it.
"""

from __future__ import annotations

import csv
import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))

from plan_zb2p import TwiceTheMemory

from hybrid_strategy.planning.flops import FlopConvention, training_flops_per_token
from hybrid_strategy.planning.memory import memory_ledger, peak_ledger
from hybrid_strategy.planning.numerics import NUMERICS, Numerics
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.planning.stacks import COMPILED, EAGER, FUSED, Stack
from hybrid_strategy.planning.step_time import StepModel
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.cluster import ClusterSpec, cluster_from_mapping
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape

CLUSTERS = Path(__file__).resolve().parent.parent / "conf" / "cluster"
GPUS = (
    ("500W", "h100_sxm_500w"),
    ("V100", "v100_32"),
    ("A100-SXM-40", "a100_40"),
    ("A100", "a100_80"),
    ("H100", "h100_sxm"),
    ("H800", "h100_sxm"),
    ("H200", "h200"),
    ("GB200", "gb200"),
    ("B200", "b200"),
    ("MI300X", "mi300x"),
)
SCHEDULES = {
    "": "1F1B",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "gpipe": "GPipe",
    "zb-1p": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
}
TECHNIQUES = (
    "packed",
    "compile",
    "chunked ce",
    "activation checkpointing",
    "optimizer in backward",
    "activation offload",
    "8-bit adamw",
)
"""torchtune's list, each row of which keeps what those before it switched on."""

COUNTS_ALLOCATED = ("torchtune", "zero-bubble")
"""Sources whose memory figure is what was allocated; that of the others is taken for what the allocator reserved."""

COUNTS_ALL = ("torchtitan-2024", "llm-foundry")
"""Sources whose model FLOPs are 6 N + 12 L h s with N all parameters."""

FUSED_LOSS = ("llm-foundry",)
"""Sources that compute the loss in one kernel, in the place of the logits."""

WRITES_SCORES = ("vtrain", "zero-bubble", "pytorch-fsdp", "korthikanti", "bigscience", "opt-175b")
"""Sources whose attention is known to write its scores to memory; else everything before 2023 does."""

SIMULATED = ("vtrain-single",)
"""Sources whose step times a simulator made, whatever they are labelled (docs/planner.md): sums of profiles of one block of a
model that recomputes nothing and does not pad its vocabulary."""


@dataclass(frozen=True)
class Row:
    """One published row, read."""

    values: dict[str, str]
    scenario: Scenario | None
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return self.values["source_id"]

    @property
    def tag(self) -> str:
        found = re.match(r"\[([^\]]*)\]", self.values["notes"])
        return found[1].split()[0] if found else ""

    def number(self, key: str) -> float | None:
        try:
            return float(self.values[key])
        except ValueError:
            return None

    @property
    def memory_is_modelled(self) -> bool:
        """Offloading and 8-bit states are not."""
        return "activation offload" not in _techniques(self.values)

    @property
    def convention(self) -> FlopConvention:
        """What the source's TFLOP/s and percentages count."""
        recompute = self.values["act_ckpt"] if self.values["which"] == "hfu" else "none"
        counted = recompute if recompute in ("full", "selective") else "none"
        return FlopConvention(all_parameters=self.source in COUNTS_ALL, recompute=counted)

    @property
    def measured_seconds(self) -> float | None:
        """Seconds of a step, from whichever figure the row has."""
        if (seconds := self.number("step_time_s")) is not None:
            return seconds
        if self.scenario is None:
            return None
        tokens, gpus = self.scenario.step_tokens, self.scenario.layout.world_size
        if (rate := self.number("tokens_per_s_per_gpu")) is not None:
            return tokens / (rate * gpus)
        flops = self.measured_flops
        return training_flops_per_token(self.scenario.shape, self.convention) * tokens / (flops * gpus) if flops else None

    @property
    def measured_flops(self) -> float | None:
        """FLOP/s of one GPU as the row states it."""
        if (teraflops := self.number("tflops_per_gpu")) is not None:
            return teraflops * 1e12
        percent, scenario = self.number("mfu_or_hfu_pct"), self.scenario
        if percent is None or scenario is None:
            return None
        peak = scenario.cluster.peak_fp8_flops if "FP8 peak" in self.values["notes"] else scenario.cluster.peak_flops
        return percent / 100 * peak

    @property
    def forecast_seconds(self) -> float:
        """What the planner says; the table is played where the schedule is one of ours."""
        assert self.scenario is not None
        return StepModel(self.scenario).step_time(play=self.scenario.schedule_part is None).step_seconds

    @property
    def forecast_memory_bytes(self) -> float:
        """What the planner says of the figure that the source measured: bytes handed out, or reserved by the allocator."""
        assert self.scenario is not None
        if self.tag == "analytic":
            return sum(line.bytes for line in memory_ledger(self.scenario, 0).lines if "blocks" in line.name)
        ledger = peak_ledger(self.scenario)
        reserved = sum(line.bytes for line in ledger.lines if line.name == "fragmentation")
        return ledger.allocated_bytes + (0.0 if self.source in COUNTS_ALLOCATED else reserved)

    @property
    def layout_key(self) -> tuple[str, ...]:
        """What a layout is made of."""
        names = ("dp", "fsdp_or_zero_stage", "tp", "sp", "pp", "vpp", "schedule", "cp", "micro_batch")
        return tuple(self.values[name] for name in names)

    @property
    def group_key(self) -> tuple[str, ...]:
        """Rows that agree in this differ in layout only."""
        names = ("source_id", "model", "layers", "hidden", "seq_len", "gpu", "n_gpus", "global_batch", "precision", "act_ckpt")
        return tuple(self.values[name] for name in names)


def read_rows(path: Path) -> list[Row]:
    """All rows of a file."""
    with path.open(newline="") as file:
        return [read_row(values) for values in csv.DictReader(file)]


def read_row(values: dict[str, str]) -> Row:
    """One row; without a scenario where the layout cannot be known."""
    notes: list[str] = []
    shape = _shape(values, notes)
    cluster = _cluster(values, notes)
    missing = [key for key in ("n_gpus", "tp", "pp") if not values[key]]
    if not values["micro_batch"]:
        missing.append("micro_batch")
    if shape is None:
        missing.append("model shape")
    if cluster is None:
        missing.append("gpu")
    if "unpacked" in values["notes"]:
        missing.append("length of the unpacked sequences")
    if values.get("ep") not in ("", "1", None):
        missing.append("experts are not modelled")
    if shape is None or cluster is None or not values["n_gpus"]:
        return Row(values, None, tuple(notes), tuple(missing))
    scenario = _scenario(values, shape, cluster, notes)
    return Row(values, scenario, tuple(notes), tuple(missing))


def _int(values: dict[str, str], key: str, default: int) -> int:
    try:
        return int(float(values[key]))
    except ValueError:
        return default


def _float(text: str) -> float:
    """A number, 0 where there is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _shape(values: dict[str, str], notes: list[str]) -> ModelShape | None:
    hidden, sequence = _int(values, "hidden", 0), _int(values, "seq_len", 0)
    if not hidden or not sequence:
        return None
    ffn = _int(values, "ffn_hidden", 4 * hidden)
    gated = abs(ffn - 4 * hidden) > hidden // 64
    heads = _int(values, "heads", hidden // 128)
    vocab = _int(values, "vocab", 0)
    if not vocab:
        vocab = _vocabulary(values, hidden, sequence, ffn, gated)
        notes.append(f"vocab {vocab}")
    billions = _float(values["params_b"])
    layers = _int(values, "layers", 0)
    if not layers:
        if not billions:
            return None
        layers = 2 * round(billions * 1e9 / (12 * hidden**2) / 2)
        notes.append(f"layers {layers}")
    plain = ModelShape(
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_int(values, "kv_heads", heads),
        intermediate_size=ffn,
        vocab_size=vocab,
        sequence_length=sequence,
        gated_mlp=gated,
        bias=not gated and "MPT" not in values["model"],
        learned_positions=not gated,
    )
    tied, untied = replace(plain, tied_embeddings=True), plain
    if not billions:
        return untied if gated else tied
    return min(untied, tied, key=lambda each: abs(each.num_parameters - billions * 1e9))


def _vocabulary(values: dict[str, str], hidden: int, sequence: int, ffn: int, gated: bool) -> int:
    """The vocabulary that a row's own FLOP/s and tokens/s tell (full attention, MFU); else GPT-2's, padded."""
    try:
        per_token = float(values["tflops_per_gpu"]) * 1e12 / float(values["tokens_per_s_per_gpu"])
    except ValueError:
        return 51200
    layers, kv = _int(values, "layers", 0), _int(values, "kv_heads", 1) / max(1, _int(values, "heads", 1))
    block = 2 * hidden**2 * (1 + kv) + (3 if gated else 2) * hidden * ffn
    told = (per_token - 6 * layers * block - 12 * layers * hidden * sequence) / (6 * hidden)
    return min((32000, 51200, 128256, 256000), key=lambda known: abs(known - told))


@cache
def cluster_named(name: str) -> ClusterSpec:
    """The cluster of `conf/cluster/<name>.yaml`."""
    return cluster_from_mapping(yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text()))


def _cluster(values: dict[str, str], notes: list[str]) -> ClusterSpec | None:
    name = next((cluster for word, cluster in GPUS if word in values["gpu"]), None)
    if name is None:
        return None
    if name == "a100_80" and 0 < _float(values["gpu_mem_gb"]) <= 40:
        name = "a100_40"
    per_node = _int(values, "gpus_per_node", cluster_named(name).gpus_per_node)
    gpus = _int(values, "n_gpus", per_node)
    cluster = replace(cluster_named(name), gpus_per_node=per_node, num_nodes=max(1, -(-gpus // per_node)))
    rate = re.search(r"(?:(\d+) ?x ?)?([\d.]+) ?(G|T)b/s", values["notes"])
    if rate:
        per_node_bits = float(rate[1] or 1) * float(rate[2]) * (1e9 if rate[3] == "G" else 1e12)
        per_gpu = per_node_bits / 8 / per_node
        notes.append(f"network {per_gpu / 1e9:.1f} GB/s a GPU")
        cluster = replace(cluster, inter_node=replace(cluster.inter_node, bytes_per_second=per_gpu))
    return cluster


def _stack(values: dict[str, str], zero3: bool) -> Stack:
    notes = values["notes"].lower()
    techniques = _techniques(values)
    if "compile" in techniques or ("compile" in notes and "no compile" not in notes):
        return replace(COMPILED, logits_bytes=2 + COMPILED.logits_bytes / 8) if "chunked ce" in techniques else COMPILED
    stack = EAGER if zero3 or values["source_id"].startswith(("torchtune", "torchtitan", "litgpt")) else FUSED
    if values["source_id"].startswith(FUSED_LOSS):
        stack = replace(stack, logits_bytes=4.0, loss_bytes=10.0)
    writes = values["source_id"].startswith(WRITES_SCORES) or (values["year"] and int(values["year"]) < 2023)
    if values["source_id"] in SIMULATED:
        stack = replace(stack, pads_vocabulary=False)
    return stack.classic() if writes else stack


def _techniques(values: dict[str, str]) -> tuple[str, ...]:
    """What a row of a cumulative list has switched on."""
    if values["source_id"] != "torchtune":
        return ()
    notes = values["notes"].lower()
    last = max((index for index, each in enumerate(TECHNIQUES) if f"+{each}" in notes), default=-1)
    return TECHNIQUES[: last + 1]


def _numerics(values: dict[str, str], stack: Stack, zero3: bool) -> Numerics:
    precision = values["precision"].lower()
    fp8 = "fp8" in precision
    if "18 B/param" in values["notes"]:
        return NUMERICS["mixed_fp32_gradients"]
    if "pure" in precision and "composer" not in precision:
        late = "optimizer in backward" in _techniques(values)
        return replace(NUMERICS["pure_16"], gradient_bytes=0) if late else NUMERICS["pure_16"]
    if "composer pure" in precision:
        return replace(NUMERICS["sharded_mixed"], reduce_bytes=2)
    if zero3 or stack.name != "fused":
        return replace(NUMERICS["sharded_mixed"], fp8=fp8)
    if "bf16" in precision or fp8:
        return replace(NUMERICS["mixed_fp32_gradients"], fp8=fp8)
    return NUMERICS["mixed"]


def _scenario(values: dict[str, str], shape: ModelShape, cluster: ClusterSpec, notes: list[str]) -> Scenario:
    gpus, tensor, pipeline = _int(values, "n_gpus", 1), _int(values, "tp", 1), _int(values, "pp", 1)
    context, chunks = _int(values, "cp", 1), _int(values, "vpp", 1)
    data = _int(values, "dp", max(1, gpus // (tensor * pipeline * context)))
    stage = values["fsdp_or_zero_stage"]
    zero3 = stage == "3" or "hybrid" in stage.lower() or "hsdp" in stage.lower()
    stack = _stack(values, zero3)
    group = re.search(r"hybrid-(\d+)", stage)
    sharding = "zero3" if zero3 else ("zero" + stage if stage in ("1", "2") else "ddp")
    if "distributed" in stage.lower():
        sharding = "zero1"
    if not stage and stack.name == "fused" and stack.flash_attention:
        sharding = "zero1"  # the distributed optimizer is the default of Megatron and NeMo since 2023
    if data == 1:
        sharding = "ddp"
    micro = _int(values, "micro_batch", 1)
    total = _int(values, "global_batch", data * micro * (4 * pipeline if pipeline > 1 else 1))
    schedule = "Interleaved1F1B" if chunks > 1 and not values["schedule"] else values["schedule"]
    checkpoint = values["act_ckpt"] if values["act_ckpt"] in ("none", "selective", "full") else "none"
    checkpoint = "none" if values["source_id"] in SIMULATED else checkpoint
    if not values["act_ckpt"]:
        notes.append("no activation checkpoint")
    layout = Layout(
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        context_parallel_size=context,
        data_parallel_replicate_size=data // int(group[1]) if group else 1,
        sharding=sharding,
        sequence_parallel=tensor > 1 and (values["sp"] == "yes" or (values["sp"] == "" and stack.flash_attention)),
        schedule=SCHEDULES.get(schedule, schedule),
        stages_per_rank=chunks,
        activation_checkpoint=checkpoint,
    )
    scenario = Scenario(
        shape=shape,
        layout=layout,
        batch=BatchSpec(total, num_microbatches=max(1, total // (data * micro))),
        cluster=cluster,
        numerics=_numerics(values, stack, zero3),
        stack=stack,
        stage_layers=even_stage_layers(shape.num_layers, layout.num_stages),
        recompute_fraction=_recompute_fraction(values),
    )
    return scenario if schedule != "zb-2p" else replace(scenario, schedule_part=TwiceTheMemory())


def even_stage_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage as most people cut: even; the ends, which hold embedding and head, are the lighter.

    >>> even_stage_layers(32, 8)[0], even_stage_layers(46, 16)[:2], even_stage_layers(126, 16)[-2:], even_stage_layers(10, 4)
    (4, (2, 3), (8, 7), (2, 3, 3, 2))
    """
    base, rest = divmod(num_layers, num_stages)
    first = (num_stages - rest) // 2
    return tuple(base + (1 if first <= stage < first + rest else 0) for stage in range(num_stages))


def _recompute_fraction(values: dict[str, str]) -> float | None:
    """Share of the forward pass that is repeated, where a source says so by stating both HFU and MFU."""
    stated = re.search(r"HFU stated ([\d.]+)", values["notes"])
    mfu = _float(values["mfu_or_hfu_pct"])
    if values["act_ckpt"] == "selective" and values["which"] == "mfu" and stated and mfu:
        return min(1.0, max(0.0, 3 * (float(stated[1]) / mfu - 1)))
    return 0.5 if values["act_ckpt"] == "selective" and "selective layer AC" in values["notes"] else None
