"""What goes wrong with data files, in one line."""


class DataError(RuntimeError):
    """A data set is missing, damaged, or cannot be downloaded; the message says which and what to do."""
