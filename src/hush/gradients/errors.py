"""What the engine refuses. No message holds a value of the data."""


class HushError(Exception):
    """Anything that hush refuses on purpose."""


class MixedExamples(HushError, ValueError):
    """The loss of one example depends on another, so that no clipping could bound what one example does."""


class NotSupported(HushError, ValueError):
    """Something that cannot be trained privately as it is written; the message names it and the remedy."""
