"""The MLflow logger by itself: one run for all attempts, of the first rank alone, and a job that goes on without MLflow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

pytest.importorskip("mlflow", reason="pip install 'hybrid-strategy[mlflow]'")
pytestmark = pytest.mark.filterwarnings("default")  # MLflow's own

from hybrid_strategy.reporting.mlflow_run import MlflowRunLogger  # noqa: E402


def test_the_next_attempt_goes_on_with_the_run(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    ids = []
    for attempt in (1, 2):
        logger = MlflowRunLogger("e", "point", save_dir=str(tmp_path), run_dir=str(tmp_path), tags={"sweep": "s"})
        logger.log_hyperparams({"strategy": {"sharding": "ddp"}, "resume": f"attempt{attempt}"})
        logger.log_metrics({"train_loss": 3.0 / attempt, "val/loss": float("nan")}, step=attempt)
        logger.finalize("failed" if attempt == 1 else "success")
        assert "problem" not in logger.where(), logger.where()
        ids.append(logger.version)
    assert ids[0] == ids[1]
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (run.info.run_id, run.info.status, run.info.run_name) == (ids[0], "FINISHED", "point")
    assert run.data.tags["sweep"] == "s"
    assert run.data.params == {"strategy/sharding": "ddp", "resume": "attempt1"}
    assert [(each.step, each.value) for each in client.get_metric_history(ids[0], "train_loss")] == [(1, 3.0), (2, 1.5)]


def test_other_ranks_have_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = MlflowRunLogger("e", save_dir=str(tmp_path), run_dir=str(tmp_path))
    logger.log_metrics({"train_loss": 1.0}, step=1)
    logger.finalize()
    assert (logger.name, logger.version) == ("e", None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("uri", "store"),
    [("http://us%40er:p%2Fw@host:5000/x", "http://host:5000/x"), ("postgresql://u:pw@host/db", "postgresql://host/db")],
)
def test_no_password_of_a_store_comes_into_a_file(uri: str, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # none is asked
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "")
    logger = MlflowRunLogger("e", save_dir=str(tmp_path), run_dir=str(tmp_path))
    assert logger.where() == {"id": None, "store": store}
    if uri.startswith("http"):  # what MLflow prints is what it was given; the rest it finds there
        assert logger._tracking_uri == store
        assert (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]) == ("us@er", "p/w")


def test_no_password_of_a_store_is_in_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="MLflow does not work") as told:
        MlflowRunLogger("e", save_dir=str(tmp_path), tracking_uri="nosuch://user:pa55word@store")
    assert "pa55word" not in "".join(str(each.message) for each in told)


def test_a_store_that_cannot_be_had_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="MLflow does not work"):
        logger = MlflowRunLogger("e", save_dir=str(tmp_path), tracking_uri="nosuch://store")
    logger.log_hyperparams({"a": 1})
    logger.log_metrics({"train_loss": 1.0}, step=1)
    logger.experiment.set_tag(logger.version, "key", 1)
    logger.finalize("success")
    assert logger.where()["problem"]
