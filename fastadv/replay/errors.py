"""What went wrong with a user's files or options, in words for the user."""


class ReplayError(Exception):
    """A mistake in what was given: the command prints the message and stops, without a traceback."""
