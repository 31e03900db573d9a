"""What can be caught: every refusal that is about privacy and not about a slip of the hand.

No text of an error holds a value that was computed from the data.
"""


class HushError(Exception):
    """The base of the library's own exceptions."""


class MixedExamples(HushError, ValueError):
    """The losses of a batch are not independent: one example moves what is computed for another."""


class NotSupported(HushError, ValueError):
    """Something that cannot be trained privately, or not yet; the message names the remedy."""
