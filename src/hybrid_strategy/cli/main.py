"""The one command, `hybrid`: finds the sub-command, runs it, turns what it raises into a message and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from hybrid_strategy.errors import HybridError, RunError, did_you_mean, message, of_file_system

COMMANDS = {
    "train": "train a model under the layout of the configuration",
    "plan": "show what train would run, and start nothing",
    "doctor": "measure this machine, for forecasts of it",
    "calibrate": "refit what is known of a machine to measured runs",
    "inspect": "show what is seen of a model: parts, units, rules, what is not understood",
    "profile": "measure the model's layers and cut the stages by it",
    "check": "compare the numbers of the layout with those of one process",
    "export": "write the weights of a checkpoint as safetensors",
    "sweep": "status, logs, cancel, resume or report of a sweep",
}
"""Sub-command -> what it does. Each is the function `run(arguments) -> exit code` of the module of its name in this folder."""

CLOSED_PIPE = 141
"""As shells count a process that wrote into a closed pipe."""

EXIT_CODES = {
    0: "done",
    1: "failed while running",
    2: "the configuration is wrong; nothing was started",
    3: "no layout fits",
    4: "a check failed",
    5: "a sweep ended with failed points",
    75: "stopped by a signal between two steps, after a checkpoint; start it again",
    130: "stopped by Ctrl-C before training, or by the third one",
    CLOSED_PIPE: "nobody reads the output any more",
}


def usage() -> str:
    """The text of `hybrid --help`."""
    commands = "\n".join(f"  {name:<9} {what}" for name, what in COMMANDS.items())
    codes = "\n".join(f"  {code:<8} {what}" for code, what in EXIT_CODES.items())
    return (
        f"usage: hybrid <command> [key=value ...]\n\ncommands:\n{commands}\n\n"
        f"hybrid <command> --help says more; hybrid --version.\n\nexit codes:\n{codes}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `hybrid` with these arguments (default: those of the process) and returns its exit code.

    A reader that has seen enough (`hybrid plan ... | head`) closes the pipe; what is left unsaid then is no error.
    """
    code = CLOSED_PIPE
    try:
        code = _main(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(f"hybrid-strategy {version('hybrid-strategy')}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(message("command", name, "there is no such command", "", did_you_mean(name, COMMANDS)), file=sys.stderr)
        return 2
    return _run(name, rest)


def _run(name: str, arguments: list[str]) -> int:
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # the ranks find modules of the user's here, so the other commands do as well
    try:
        code: int = importlib.import_module(f"hybrid_strategy.cli.{name}").run(arguments)
        return code
    except HybridError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(of_file_system(error), file=sys.stderr)
        return RunError.exit_code
    except KeyboardInterrupt as stopped:
        print(f"\n{str(stopped) or 'stopped by Ctrl-C'}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
