"""Errors that a user can act on."""


class TilerankError(Exception):
    """A failure with a one-line message that says what is wrong, what is allowed and what to do.

    Command lines and stages print the message without a traceback and exit with code 1.
    """
