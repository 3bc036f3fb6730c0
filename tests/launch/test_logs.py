"""The log holds what the terminal shows, without colours and without the lines a progress bar has overwritten."""

from __future__ import annotations

import io

from hybrid_strategy.launch.logs import Tee


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _both(*texts: str) -> tuple[str, str]:
    terminal, log = _Terminal(), io.StringIO()
    tee = Tee(terminal, log)
    for text in texts:
        tee.write(text)
    tee.close()
    return terminal.getvalue(), log.getvalue()


def test_the_terminal_gets_everything_unchanged():
    assert _both("a\r", "\x1b[1mb\x1b[0m\n")[0] == "a\r\x1b[1mb\x1b[0m\n"


def test_colours_do_not_reach_the_log():
    assert _both("\x1b[1;31mred\x1b[0m text\n")[1] == "red text\n"


def test_only_the_last_state_of_a_line_reaches_the_log():
    assert _both("step 1\r", "step 2\r", "step 3\n", "end\n")[1] == "step 3\nend\n"
    assert _both("\rstep 1", "\rstep 2", "\n")[1] == "step 2\n"


def test_a_line_without_an_end_is_kept():
    assert _both("no newline")[1] == "no newline\n"
    assert _both("windows\r", "\nend")[1] == "windows\nend\n"


def test_a_tee_on_a_terminal_is_a_terminal():
    assert Tee(_Terminal(), io.StringIO()).isatty()
    assert not Tee(io.StringIO(), io.StringIO()).isatty()
