"""What a user can get wrong, each kind with its documented exit code."""

from __future__ import annotations


class InfllmError(Exception):
    """A failure that the user can mend; the message names the file or flag and the next step."""

    exit_code = 1


class UsageError(InfllmError):
    """A flag, an argument or a combination of them that cannot work."""

    exit_code = 2


class DocumentError(InfllmError):
    """A document that cannot be read as text."""

    exit_code = 3


class EmptyDocument(DocumentError):
    """A document without any text; among several files it is left out."""


class ModelError(InfllmError):
    """A model that cannot be found, loaded or vouched for."""

    exit_code = 4


class CapacityError(InfllmError):
    """Out of memory or disk, or a limit that the user set would be passed."""

    exit_code = 5


class Interrupted(Exception):
    """The user stopped an answer; what was written so far is out."""

    exit_code = 130


class OutputClosed(Exception):
    """The reader of our output has what it wanted (`| head`): no failure."""

    exit_code = 0
