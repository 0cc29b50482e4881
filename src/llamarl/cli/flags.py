"""What verbs share: refusing flags, and files written under the user's names."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence

from llamarl.errors import ConfigError, LlamaRLError, Mistake

__all__ = ["OutputFile", "refuse_flags"]


def refuse_flags(mistakes: Sequence[Mistake | str]) -> None:
    """Raises ConfigError with all of them, if there are any."""
    if mistakes:
        from llamarl.strict import list_mistakes

        raise ConfigError(str(mistakes[0]) if len(mistakes) == 1 else list_mistakes(mistakes, "the command line"))


class OutputFile:
    """A text file that a flag names: opened before the work that fills it, so that a wrong path
    costs nothing. What it held before stays until the first line is written, or the work has ended
    well.

    Raises:
        ConfigError: It cannot be opened.
    """

    def __init__(self, path: str, flag: str) -> None:
        self._name = f"{flag} {path}"
        try:
            self._file = open(path, "a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{self._name}: cannot be written ({error.strerror}); give a file in a folder that exists"
            ) from error
        self._holds_earlier = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)

    def _drop_earlier(self) -> None:
        if self._holds_earlier:
            self._file.truncate(0)
            self._holds_earlier = False

    def write_line(self, text: str) -> None:
        """Write a line and flush it.

        Raises:
            LlamaRLError: The disk is full, or gone.
        """
        with self._writing():
            self._drop_earlier()
            print(text, file=self._file, flush=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LlamaRLError(f"{self._name}: cannot write: {error.strerror}") from error

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):  # of what could not be written: that is told already
                self._file.close()
            return
        with self._writing():
            self._drop_earlier()
            self._file.close()
