"""Hydra's sweepers `grid` and `layouts`: doors to `hybrid_strategy.sweeping`, imported only when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class GridSweeper(Sweeper):
    """Every combination of values, and sets of values that go together."""

    kind = "grid"

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.launcher: Launcher | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hydra.core.plugins import Plugins

        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from hybrid_strategy.sweeping.sweepers import sweep_grid

        return self._run(sweep_grid, arguments)

    def _run(self, function: Any, arguments: list[str]) -> Any:
        from hybrid_strategy.errors import HybridError
        from hybrid_strategy.sweeping.session import session_of
        from hybrid_strategy.sweeping.settings import GridSettings, LayoutsSettings, settings_of
        from hybrid_strategy.sweeping.sweepers import Sweep

        session = session_of(self.task_function, self.kind)
        kinds = {"grid": GridSettings, "layouts": LayoutsSettings}
        plain = OmegaConf.to_container(OmegaConf.create(self.settings), resolve=True)
        try:
            settings = settings_of(kinds[self.kind], dict(plain), "hydra.sweeper")  # type: ignore[arg-type]
        except HybridError as error:
            session.error = error  # Hydra would print it its own way
            return None
        return function(Sweep(self.hydra_context.config_loader, self.config, settings, session), arguments, self._launch)

    def _launch(self, points: Sequence[Sequence[str]]) -> Any:
        assert self.launcher is not None  # made by `setup`
        return self.launcher.launch(points, initial_job_idx=0)


class LayoutsSweeper(GridSweeper):
    """Every valid layout of the processes at hand."""

    kind = "layouts"

    def sweep(self, arguments: list[str]) -> Any:
        from hybrid_strategy.sweeping.sweepers import sweep_layouts

        return self._run(sweep_layouts, arguments)
