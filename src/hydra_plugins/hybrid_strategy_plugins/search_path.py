"""Lets any Hydra application say `defaults: - strategy: hybrid`: our groups are found after the application's own.

Hydra imports this module in every application on the machine, so it imports nothing but Hydra.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

PROVIDER = "hybrid_strategy"


class HybridStrategySearchPath(SearchPathPlugin):
    """Appends `conf/`, and the folder that `sweeps/` is a group of: the installed package, or the checkout."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        spec = find_spec("hybrid_strategy")
        if spec is None or spec.origin is None:
            return
        package = Path(spec.origin).parent
        folder = next((each for each in (package / "conf", package.parents[1] / "conf") if each.is_dir()), None)
        if folder is not None:
            search_path.append(PROVIDER, f"file://{folder}")
            search_path.append(PROVIDER, f"file://{folder.parent}")
