"""Errors that a user can mend; the text of each is the whole message."""


class TrainerError(Exception):
    """A mistake or failure that its one line explains; shown without a traceback."""


class ConfigError(TrainerError, ValueError):
    """A setting has a value that is not valid; the text names it, and what is valid."""


class DataError(TrainerError):
    """A data file is missing, damaged, or does not fit the others."""
