"""From what was found to a report: the first divergence, its likely causes, and what else should be known."""

from __future__ import annotations

from hybrid_strategy.parity.compare import Comparison
from hybrid_strategy.parity.diagnosis import diagnose, explain_ratio, factors_of
from hybrid_strategy.parity.files import GRADIENTS
from hybrid_strategy.parity.records import RunRecord
from hybrid_strategy.parity.report import ParityReport
from hybrid_strategy.parity.request import ParityRequest
from hybrid_strategy.parity.samples import misread
from hybrid_strategy.parity.tally import LOSS, NORM, WORDS, Miss


def judge(request: ParityRequest, reference: RunRecord, layout: RunRecord) -> ParityReport:
    """Compares two runs.

    Raises:
        RunError: the runs did not take the same number of steps.
    """
    comparison = Comparison(request, reference, layout)
    comparison.run()
    tally = comparison.tally
    num_microbatches = max(rank.facts["num_microbatches"] for rank in layout.ranks)
    factors = factors_of(request.layout, num_microbatches, request.accumulate)
    first = tally.first()
    return ParityReport(
        layout=request.layout.name,
        settings=_settings(request, num_microbatches),
        steps=comparison.steps,
        num_tensors=len(reference.names),
        rows=tally.rows(comparison.steps),
        first=tally.divergence(first) if first else None,
        diagnoses=tuple(_diagnoses(comparison, first, factors)) if first else (),
        notes=tuple(_notes(reference, first is not None)),
        reason=comparison.bounds.reason,
    )


def _diagnoses(comparison: Comparison, first: Miss, factors: dict[str, int]) -> list[str]:
    tally = comparison.tally
    place = first.place
    found = [text] if (text := misread(comparison.reference, comparison.layout, comparison.sizes, max(place.step, 0))) else []
    if place.kind in (LOSS, NORM) and first.clue is not None and first.clue.ratio is not None:
        found += [f"scaled: the {WORDS[place.kind]} is {cause}" for cause in explain_ratio(first.clue.ratio, factors)]
    kind = GRADIENTS if place.kind in (LOSS, NORM) else place.kind
    misses = tally.at(place.step, [kind])
    clues = [miss.clue for miss in misses if miss.clue is not None]
    if misses:
        found += diagnose(WORDS[kind], clues, tally.telling(misses[0].place), factors)
    elif place.kind == NORM:
        found.append("norm: the gradients are right and their norm is not, so pieces are left out or counted more than once")
    return found


def _settings(request: ParityRequest, num_microbatches: int) -> str:
    layout = request.layout
    words = [f"{request.world_size} process{'es' if request.world_size > 1 else ''}"]
    if layout.pipeline_parallel_size > 1:
        words.append(f"schedule {layout.schedule}")
    words.append(f"{num_microbatches} micro-batch{'es' if num_microbatches > 1 else ''}")
    if request.accumulate > 1:
        words.append(f"{request.accumulate} batches accumulated")
    if layout.activation_checkpoint != "none":
        words.append(f"activation checkpoint {layout.activation_checkpoint}")
    if layout.compile:
        words.append("layers compiled")
    return ", ".join([*words, request.precision])


def _notes(reference: RunRecord, differs: bool) -> list[str]:
    facts = reference.ranks[0].facts
    notes = []
    if facts.get("dropout_modules"):
        notes.append(f"dropout was set to 0 in {facts['dropout_modules']} modules of both runs: layouts draw other masks")
    if differs and facts.get("batch_norms"):
        where = f"{facts['batch_norms']} BatchNorm modules normalise"
        notes.append(f"{where} over the rows at hand: a layout that cuts the batch gives them fewer, so numbers cannot agree")
    if differs and facts.get("loss_is_a_sum"):
        rule = "a layout takes the loss of each micro-batch and data-parallel rank as a mean"
        notes.append(f"training_step returns a sum over its rows: {rule}, so numbers agree only where the batch is not divided")
    if differs and facts.get("draws_random_numbers"):
        notes.append("training_step draws random numbers; layouts draw others, so numbers that depend on them cannot agree")
    return notes
