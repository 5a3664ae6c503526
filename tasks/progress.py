"""Progress of a stage, shown elsewhere from time to time without delaying the stage."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

SECONDS_BETWEEN = 5.0
log = logging.getLogger("infini_llama.live")


@dataclass(frozen=True)
class Reached:
    """How far a stage is; a log record carries it as `extra={"progress": Reached(...)}`.

    Attributes:
        total: None: unknown.
        due: shown even if another one was shown a moment ago.
        loss: of a training step, NaN if its update was skipped; None in other stages.
    """

    done: float
    total: float | None
    unit: str
    due: bool = False
    loss: float | None = None


def megabytes(done: int, total: int) -> Reached:
    """Progress through bytes."""
    return Reached(round(done / 1e6, 1), round(total / 1e6, 1), "MB")


def progress_of(record: logging.LogRecord) -> Reached | None:
    """Progress that a log record carries."""
    return getattr(record, "progress", None)


class Live(logging.Handler):
    """Hands the newest progress record of a logger to `show` in a thread of its own; within `with`.

    Args:
        name: of the logger, one of those below "infini_llama" whose records carry a `Reached`.
        show: takes percent (None where no total is known) and the record's message; whatever it
            raises is logged once, and ignored.
        seconds: between two calls.
    """

    def __init__(
        self,
        name: str,
        show: Callable[[float, str], None],
        seconds: float = SECONDS_BETWEEN,
    ) -> None:
        super().__init__(logging.DEBUG)
        self.logger = logging.getLogger(name)
        self.show = show
        self.seconds = seconds
        self.newest: tuple[float, str] | None = None
        self.news = threading.Event()
        self.over = threading.Event()
        self.failed = False
        self.thread = threading.Thread(
            target=self._run, name=f"live {name}", daemon=True
        )

    def emit(self, record: logging.LogRecord) -> None:
        progress = progress_of(record)
        if progress is None or not progress.total:
            return
        percent = min(100.0, 100 * progress.done / progress.total)
        self.newest = (percent, record.getMessage())
        self.news.set()

    def __enter__(self) -> "Live":
        self.level_before = self.logger.level
        # Each step is progress; the other handlers choose what is printed.
        self.logger.setLevel(logging.DEBUG)
        self.logger.addHandler(self)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.level_before)
        self.over.set()
        self.news.set()
        self.thread.join(self.seconds)  # the last word, unless it takes too long

    def _run(self) -> None:
        while not self.over.is_set():
            self.news.wait()
            self.news.clear()
            self._say()
            self.over.wait(self.seconds)
        self._say()

    def _say(self) -> None:
        newest, self.newest = self.newest, None
        if newest is None:
            return
        try:
            self.show(*newest)
        except Exception as fault:
            if not self.failed:
                log.warning(
                    "progress cannot be shown (%r); the run itself continues.", fault
                )
            self.failed = True
