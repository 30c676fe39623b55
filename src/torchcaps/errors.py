"""The one exception that means "the input was wrong", as opposed to "the software is"."""


class UserError(Exception):
    """Bad input, told in a sentence that says what was wrong and what to do.

    The command line prints it without a traceback and exits with code 2, or the ``exit_code``.
    """

    def __init__(self, message: str = "", exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
