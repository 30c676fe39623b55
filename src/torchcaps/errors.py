"""The one exception that means "the input was wrong", as opposed to "the software is"."""


class UserError(Exception):
    """Bad input, told in a sentence that says what was wrong and what to do.

    The command line prints it without a traceback and exits with code 2.
    """
