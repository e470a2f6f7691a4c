"""Errors that are the user's to mend: one clear line, never a traceback.

An invariant of our own is an ``assert``; what a user typed, or a file a user brought, raises a :class:`UserError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in a config, a file or an environment, described in one line.

    The line says what was given, what is allowed and, where one exists, the nearest right name.
    """


class ConfigError(UserError):
    """A config that names something unknown, is out of range, or combines what can't work together."""


class DataError(UserError):
    """A graph file that can't be used; the line names the file and the place in it."""


class CaptureError(UserError):
    """A model that can't be turned into an op graph; the line names the construct."""


class VerificationError(UserError):
    """A strategy whose answer differs from the baseline's; the line names the op."""


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name closest to ``given``, or None when nothing is close."""
    names = [str(name) for name in allowed]
    swapped = [name for name in names if sorted(name) == sorted(str(given))]  # the same letters in another order
    matches = swapped or difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    return matches[0] if matches else None


def suggestion(given: str, allowed: Iterable[str]) -> str:
    """Return "did you mean 'x'? " plus the allowed names, to end an error line with."""
    names = sorted(str(name) for name in allowed)
    best = nearest(given, names)
    hint = f"did you mean '{best}'? " if best else ""
    return f"{hint}allowed: {', '.join(names)}"
