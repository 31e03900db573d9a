"""What the guarantee allows and a person should know."""


class PrivacyWarning(UserWarning):
    """Something that the guarantee allows and that a person should know."""


def about_delta(delta: float, examples: int) -> str | None:
    """The warning where delta is so large that a mechanism publishing one whole record would satisfy it."""
    if delta * examples < 1:
        return None
    return (
        f"delta {delta:g} is not below 1 / N = {1 / examples:.2g}: a mechanism that publishes a random record "
        "as it is would be allowed by such a delta; choose one well below 1 / N"
    )
