"""What every program of torchcaps does around its work: a safe start, signals, one sentence instead of a traceback.

Nothing heavy is imported here, so that a signal is answered from the first moment on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

STOPPING = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
NO_MEMORY = "There is not enough memory. Choose a smaller batch, smaller images or fewer capsules."
_stopped_by = 0


def begin() -> None:
    """Called first by every program: nothing in the current folder is imported, and signals end it with a sentence."""
    for number in heeded():
        signal.signal(number, _stop)
    _leave_out_the_current_folder()
    os.environ["MPLBACKEND"] = "agg"  # pictures are files; what a desktop needs may be missing or misspelt
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that cannot be printed is escaped


def heeded() -> list[signal.Signals]:
    """The signals that stop a program, without those that whoever started it wants ignored, as ``nohup`` does."""
    return [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within it, the signals that stop a program go to ``handler``. In the main thread, which alone hears them."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in heeded() if main}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _leave_out_the_current_folder() -> None:
    """``python -m`` without ``-P`` puts it first, for this process and for those it starts."""
    try:
        here = os.getcwd()
    except OSError:  # it has been removed
        here = ""
    if sys.path and not sys.flags.safe_path and sys.path[0] in ("", here):
        del sys.path[0]
    if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) != here:  # or they would not find torchcaps
        os.environ["PYTHONSAFEPATH"] = "1"


def _stop(number: int, frame: FrameType | None) -> None:
    global _stopped_by
    _stopped_by = number
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            # Nothing has begun that would need an end, and an exception might be swallowed in the midst of an import.
            say("Stopped.")
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


def told(work: Callable[[], int]) -> int:
    """The exit code of some work; whatever goes wrong is told in one sentence.

    Args:
        work: returns an exit code. A :class:`torchcaps.errors.UserError` has its own.
    """
    from torchcaps.errors import UserError

    try:
        code = work()
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where it can still be told that the disk is full
        return code
    except UserError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("Stopped.", 128 + (_stopped_by or signal.SIGINT))
    except BrokenPipeError:
        _close_output()
        return 0
    except MemoryError:
        return _fail(NO_MEMORY, 2, alone=True)
    except Exception as error:
        if _stopped_by:  # and what the signal raised was turned into something else
            return _fail("Stopped.", 128 + _stopped_by)
        if isinstance(error, OSError) and error.errno is not None:
            _close_output()
            name = error.filename if isinstance(error.filename, str | bytes) else "the output"
            return _fail(f"{error.strerror}: {os.fsdecode(name)}. Nothing that was there is lost.", 2)
        if "not enough memory" in str(error) or "out of memory" in str(error):
            return _fail(NO_MEMORY, 2, alone=True)
        if _among_several() and isinstance(error, RuntimeError):
            return _fail(
                f"Another process of this run has ended, or cannot be reached. {_log(error)} The run can be resumed "
                "from its last checkpoint.",
                1,
            )
        kind = type(error).__name__
        return _fail(f"Something went wrong that should not ({kind}). Please report it. {_log(error)}", 1, alone=True)


def say(message: str) -> None:
    """One message on standard error, with what a terminal would take for a command escaped."""
    text = f"torchcaps: {printable(message)}\n"
    try:
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
    except (OSError, ValueError):
        pass  # nobody listens


def printable(text: str) -> str:
    r"""The text with everything escaped that is neither a letter or sign to be seen nor a line end.

    >>> print(printable("red \x1b[31m"))
    red \x1b[31m
    """
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)


def _fail(message: str, code: int, *, alone: bool = False) -> int:
    """Say what is wrong, once: of several processes the first one speaks and has the exit code.

    A launcher that sees another process fail might kill the first before it has spoken. Only what may have happened
    to one process ``alone`` is told by that one.
    """
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    if rank.isdecimal() and int(rank) != 0 and not alone:
        return 0
    say(message)
    return code


def _close_output() -> None:
    """Nobody reads it any more, or it cannot be written: Python must not try again when it ends."""
    try:
        sys.stdout.flush()
    except (AttributeError, OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _among_several() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _log(error: BaseException) -> str:
    """Where the details of an error are; they are written to a file."""
    import tempfile
    import traceback

    import torchcaps

    details = "".join(traceback.format_exception(error))
    words = " ".join(map(ascii, sys.argv))
    try:
        descriptor, name = tempfile.mkstemp(prefix="torchcaps-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"torchcaps {torchcaps.__version__}, python {sys.version}\n{words}\n\n{details}")
    except OSError as trouble:
        return f"The details could not be written to a file ({trouble.strerror}): {details.splitlines()[-1][:300]}"
    return f"The details are in {name}."
