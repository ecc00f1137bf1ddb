"""Errors a user can act on. Each message names the field or object, what is wrong, and the fix.

The exit codes are the trainer's half of the contract with whoever watches it (docs/run-directory.md): evidence, not
truth. Importable without JAX.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `python -m trainer train`."""

    DONE = 0
    APPLICATION_ERROR = 1
    BAD_CONFIGURATION = 64
    STORAGE_UNAVAILABLE = 74
    PREEMPTED = 75
    FENCED = 76
    WATCHDOG = 77
    NON_FINITE = 78
    MIXED_GANG = 79


class TrainerError(Exception):
    """Base of every error with a message meant for a user and an exit code meant for the orchestrator."""

    exit_code = ExitCode.APPLICATION_ERROR


class ConfigurationError(TrainerError):
    """The request itself is wrong; running it again cannot help."""

    exit_code = ExitCode.BAD_CONFIGURATION


class StorageUnavailable(TrainerError):
    """The store did not answer, or answered that it cannot (full, 5xx): the outcome of the call is unknown."""

    exit_code = ExitCode.STORAGE_UNAVAILABLE


class Fenced(TrainerError):
    """HEAD names a later attempt or start: this process may not change the run any more."""

    exit_code = ExitCode.FENCED


class TruthUnknown(StorageUnavailable):
    """HEAD is missing, unreadable or older than known: nothing may be decided or changed until somebody looks."""


class Damaged(TrainerError):
    """The bytes of an object are not those that were written."""


class MixedGang(TrainerError):
    """The processes that joined do not belong to the same attempt."""

    exit_code = ExitCode.MIXED_GANG


class NonFiniteLoss(TrainerError):
    """The loss is NaN or infinite."""

    exit_code = ExitCode.NON_FINITE
