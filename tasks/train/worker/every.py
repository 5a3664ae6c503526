"""What happens every so many steps, tokens or seconds."""

import time

from infini_llama.configs.durations import duration
from infini_llama.tasks.train.worker.position import Position
from infini_llama.tasks.train.worker.strategies.ranks import Ranks


class Every:
    """Asked once after each step whether it is time; by steps and tokens that is a function of the position alone.

    By seconds, the first rank's clock decides for all, counted from the start of the attempt or the last time.
    """

    def __init__(self, value: int | str, at: Position, ranks: Ranks) -> None:
        self.number, self.unit = duration(value)
        self.ranks, self.tokens, self.last = ranks, at.tokens, time.monotonic()

    def due(self, at: Position) -> bool:
        if self.unit == "steps":
            return at.step % self.number == 0
        if self.unit == "tokens":
            before, self.tokens = self.tokens, at.tokens
            return before // self.number < at.tokens // self.number
        mine = self.ranks.is_first and time.monotonic() - self.last >= self.number
        if due := self.ranks.sum(float(mine))[0] > 0:
            self.last = time.monotonic()
        return due
