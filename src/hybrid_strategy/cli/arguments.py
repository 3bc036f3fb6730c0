"""The arguments that the sub-commands share: overrides in Hydra's grammar, and Hydra's own flags by their own names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_strategy.config.compose import CONFIG_NAME, Source

_HELP = """
key=value sets a key, group=option chooses an option of a group:
  hybrid {command} strategy=tp2_pp2 model=llama_tiny trainer.max_steps=100
groups: model data strategy optimizer learning_rate precision trainer callbacks logger cluster experiment debug paths
--cfg job prints every key with its value. Unknown keys and wrong types are refused by name.
"""


@dataclass(frozen=True)
class Arguments:
    """A parsed command line. `hydra_flags` are those that Hydra answers itself."""

    source: Source
    cfg: str | None
    multirun: bool
    hydra_flags: tuple[str, ...]
    json: bool = False


class _Parser(argparse.ArgumentParser):
    """Overrides may stand before and after flags."""

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        return self.parse_intermixed_args(list(arguments))


def parser(command: str, what: str) -> _Parser:
    """The parser of a sub-command that takes overrides."""
    made = _Parser(
        prog=f"hybrid {command}",
        usage=f"hybrid {command} [flags] [key=value ...]",
        description=what,
        epilog=_HELP.format(command=command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    made.add_argument("--config-dir", "-cd", metavar="FOLDER", help="a folder of your own with further options of the groups")
    made.add_argument("--config-name", "-cn", metavar="NAME", default=CONFIG_NAME, help="another primary configuration")
    made.add_argument("--cfg", "-c", choices=("job", "hydra", "all"), help="print the configuration and start nothing")
    made.add_argument("--resolve", action="store_true", help="with --cfg: interpolations resolved")
    made.add_argument("--package", "-p", metavar="KEY", help="with --cfg: only this part")
    made.add_argument("--info", "-i", nargs="?", const="all", metavar="WHAT", help="searchpath, plugins, defaults, ...")
    return made


def parse(made: _Parser, arguments: Sequence[str]) -> Arguments:
    """Reads the command line; argparse itself ends the process with code 2 for flags that are not known."""
    found = made.parse(arguments)
    if not found.cfg and (found.resolve or found.package):
        made.error("--resolve and --package say how --cfg prints: add --cfg job")
    if found.cfg and found.info:
        made.error("--cfg and --info are two answers: leave one out")
    flags: list[str] = []
    if found.cfg:
        flags += ["--cfg", found.cfg]
        flags += ["--resolve"] if found.resolve else []
        flags += ["--package", found.package] if found.package else []
    elif found.info:
        flags += ["--info", found.info]
    source = Source(tuple(found.overrides), found.config_dir, found.config_name)
    return Arguments(source, found.cfg, getattr(found, "multirun", False), tuple(flags), getattr(found, "json", False))
