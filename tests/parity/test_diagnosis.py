"""What a difference tells: factors, ranks, replicas, absent tensors, from tensors alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybrid_strategy.parity.clues import Clue, beyond, clue_of, fit
from hybrid_strategy.parity.diagnosis import diagnose, explain_ratio, factors_of
from hybrid_strategy.parity.noise import Noise
from hybrid_strategy.parity.records import Piece, Whole, difference, put_together
from hybrid_strategy.parity.tolerance import tolerance_of
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.shard import ShardSpec

WANT = torch.arange(1.0, 13.0).view(4, 3)
FACTORS = {"num_microbatches": 4, "tensor_parallel_size": 2, "data_parallel_size": 3}


def _copies(*values: Tensor) -> Whole:
    return put_together("w", [Piece(rank, ShardSpec.whole("w", tuple(each.shape)), each) for rank, each in enumerate(values)])


def _rows(*values: Tensor) -> Whole:
    pieces, start = [], 0
    for rank, each in enumerate(values):
        pieces.append(Piece(rank, ShardSpec("w", (4, 3), (start, 0), tuple(each.shape)), each))
        start += each.shape[0]
    return put_together("w", pieces)


class TestPuttingTogether:
    def test_rows_of_all_ranks(self) -> None:
        whole = _rows(WANT[:3], WANT[3:3], WANT[3:])
        assert whole.is_complete
        assert whole.value is not None
        assert torch.equal(whole.value, WANT)
        assert not whole.has_copies

    def test_a_hole_is_seen(self) -> None:
        pieces = [
            Piece(0, ShardSpec("w", (4, 3), (0, 0), (2, 3)), WANT[:2]),
            Piece(1, ShardSpec("w", (4, 3), (2, 0), (2, 3)), None),
        ]
        assert not put_together("w", pieces).is_complete

    def test_overlapping_pieces_that_differ(self) -> None:
        whole = _copies(WANT, WANT, WANT + torch.eye(4, 3))
        assert whole.has_copies
        assert whole.spread == 1.0

    def test_no_rank_has_any(self) -> None:
        whole = put_together("w", [Piece(0, ShardSpec.whole("w", (4, 3)), None)])
        assert whole.value is None
        assert not whole.is_complete

    def test_a_scalar(self) -> None:
        assert _copies(torch.tensor(2.0), torch.tensor(2.0)).is_complete


@pytest.mark.parametrize(
    ("left", "right", "apart"),
    [
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (math.nan, 1.0, math.inf),
        (1.0, 1.5, 0.5),
    ],
)
def test_difference_of_what_is_not_finite(left: float, right: float, apart: float) -> None:
    assert difference(torch.tensor([left]), torch.tensor([right])) == apart
    assert beyond(torch.tensor([left]), torch.tensor([right]), torch.tensor([0.1])) == (apart > 0.1)


class TestClues:
    def test_a_factor_is_constant(self) -> None:
        clue = clue_of(_rows(4 * WANT[:2], 4 * WANT[2:]), WANT, 1e-6, Layout(data_parallel_size=2, sharding="zero1"))
        assert clue.constant
        assert clue.ratio == pytest.approx(4.0)
        assert clue.wrong_ranks == ()

    def test_rows_of_one_rank(self) -> None:
        clue = clue_of(_rows(WANT[:2], WANT[2:] + 1), WANT, 1e-6, Layout(data_parallel_size=2, sharding="zero1"))
        assert not clue.constant
        assert clue.wrong_ranks == (1,)
        assert clue.apart == ()

    def test_a_sum_that_is_missing_over_tensor_ranks(self) -> None:
        part = torch.rand(4, 3)
        clue = clue_of(_copies(part, WANT - part), WANT, 1e-5, Layout(tensor_parallel_size=2, sequence_parallel=True))
        assert clue.apart == ("tensor-parallel",)
        assert clue.sum_is_right
        assert not clue.mean_is_right

    def test_a_mean_that_is_missing_over_data_ranks(self) -> None:
        noise = torch.rand(4, 3)
        clue = clue_of(_copies(WANT + noise, WANT - noise), WANT, 1e-5, Layout(data_parallel_size=2))
        assert clue.apart == ("data-parallel",)
        assert clue.mean_is_right

    def test_zeros_and_absence(self) -> None:
        layout = Layout(pipeline_parallel_size=2)
        assert clue_of(_copies(torch.zeros(4, 3)), WANT, 1e-6, layout).zero
        assert clue_of(put_together("w", [Piece(1, ShardSpec.whole("w", (4, 3)), None)]), WANT, 1e-6, layout).absent

    def test_noise_has_no_factor_worth_naming(self) -> None:
        generator = torch.Generator().manual_seed(0)
        found = fit(torch.randn(1000, generator=generator), torch.randn(1000, generator=generator))
        assert found is not None
        assert found.error > 0.02
        assert fit(WANT, torch.zeros(4, 3)) is None
        assert fit(torch.full((3,), math.nan), torch.ones(3)) is None


class TestWords:
    @pytest.mark.parametrize(
        ("ratio", "words"),
        [
            (4.0, "x num_microbatches (4)"),
            (0.25, "/ num_microbatches (4)"),
            (2.0, "x tensor_parallel_size (2)"),
            (1 / 3, "/ data_parallel_size (3)"),
            (12.0, "x num_microbatches x data_parallel_size (4 x 3)"),
            (1 / 6, "/ (tensor_parallel_size x data_parallel_size) (2 x 3)"),
        ],
    )
    def test_a_factor_by_its_name(self, ratio: float, words: str) -> None:
        assert explain_ratio(ratio * (1 + 1e-5), FACTORS)[0].startswith(words)

    def test_a_factor_of_two_sizes_names_both(self) -> None:
        assert len(explain_ratio(2.0, {"tensor_parallel_size": 2, "data_parallel_size": 2})) == 2

    def test_a_factor_of_no_size(self) -> None:
        assert explain_ratio(1.7, FACTORS) == []
        assert "no size of the run is 1.7" in diagnose("gradients", [Clue("w", ratio=1.7, constant=True)], 5, FACTORS)[0]

    def test_sizes_of_one_explain_nothing(self) -> None:
        assert factors_of(Layout(tensor_parallel_size=2), 1, 1) == {"tensor_parallel_size": 2}

    def test_the_surest_cause_comes_first_and_each_tensor_counts_once(self) -> None:
        clues = [
            Clue("scaled", ratio=4.0, constant=True),
            Clue("gone", absent=True),
            Clue("apart", ratio=4.0, constant=True, apart=("data-parallel",), sum_is_right=True),
            Clue("rows", wrong_ranks=(1,)),
            Clue("unclear", ratio=0.3),
        ]
        found = diagnose("gradients", clues, 9, FACTORS)
        assert [each.split(":")[0] for each in found] == ["absent", "unsynchronised replica", "scaled", "part of the ranks"]
        assert not any("unclear" in each for each in found)

    def test_many_names_are_cut_short(self) -> None:
        clues = [Clue(f"w{index}", ratio=2.0, constant=True) for index in range(6)]
        assert "w0, w1, w2 and 3 more" in diagnose("gradients", clues, 9, FACTORS)[0]
        assert diagnose("gradients", clues, 6, FACTORS)[0].startswith("scaled: all gradients are x 2")


class TestNoise:
    def test_an_element_without_a_difference_may_move_by_rounding_only(self) -> None:
        noise = Noise.over(WANT)
        noise.add_gradients(WANT, WANT)
        noise.add_move(1e-3)
        assert float(noise.allowed.max()) <= 1.1e-8

    def test_an_element_that_is_all_noise_may_go_the_other_way(self) -> None:
        want = torch.tensor([1.0, 1e-8])
        noise = Noise.over(want)
        noise.add_gradients(want, torch.tensor([1.0, -1e-8]))
        noise.add_move(1e-3)
        assert noise.allowed[0] <= 1.1e-8
        assert noise.allowed[1] >= 2e-3

    def test_what_was_once_off_stays_off(self) -> None:
        noise = Noise.over(torch.ones(1))
        noise.add_gradients(torch.ones(1), torch.ones(1) + 1e-3)
        noise.add_move(1.0)
        first = float(noise.allowed)
        noise.add_gradients(torch.ones(1), torch.ones(1))
        noise.add_move(1.0)
        assert float(noise.allowed) > 1.9 * first


@pytest.mark.parametrize(
    ("precision", "loss", "gradient"),
    [
        ("32-true", 1e-6, 1e-5),
        ("32", 1e-6, 1e-5),
        ("64-true", 1e-6, 1e-10),
        ("bf16-mixed", 2**-8, 2**-4),
        ("16-mixed", 2**-11, 2**-7),
    ],
)
def test_bounds_by_precision(precision: str, loss: float, gradient: float) -> None:
    bounds = tolerance_of(precision)
    assert (bounds.loss, bounds.gradient) == (loss, gradient)
    assert bounds.reason
