"""Our exceptions, sorted by what the caller should do."""


class ReactorError(Exception):
    """Whatever this package raises on purpose."""


class Unavailable(ReactorError):
    """A dependency is out of reach and nothing was changed: try again later.

    Args:
        message: What is out of reach. It is logged and stored, so it quotes no text, secret or URL.
        retry_after_s: When the dependency itself named a delay, that delay in seconds.
        code: A short stable word for logs and `last_error`.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None, code: str = "unavailable") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code


class Permanent(ReactorError):
    """Trying again cannot help: the job is dead at once and waits for a person.

    The message is stored and logged, so it quotes no tenant text.
    """

    def __init__(self, message: str, *, code: str = "permanent") -> None:
        super().__init__(message)
        self.code = code


class StaleClaim(ReactorError):
    """The lease passed to another worker: drop the result, write nothing."""


class Misuse(ReactorError):
    """The caller's words are off: one clear line, exit code 2 on the command line."""
