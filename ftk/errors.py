"""The one exception class for what the user can mend."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave: a flag, a file, a configuration.

    The message says what is wrong, where (file:line, field, flag) and how to mend it, in one or two lines.
    It is raised where the fact is known and printed once, without traceback, by the command
    (`ftk_cli.frame.run`), which then exits with code 2.
    """
