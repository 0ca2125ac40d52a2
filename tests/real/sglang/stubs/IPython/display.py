"""The two names that SGLang imports; a server calls neither."""


def HTML(*_: object) -> None:  # noqa: N802 - IPython's name
    """Do nothing."""


def display(*_: object) -> None:
    """Do nothing."""
