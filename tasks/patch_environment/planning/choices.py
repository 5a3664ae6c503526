"""How a setting gets its value: from the configuration, else from the run's first attempt, else by rule."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from infini_llama.configs.errors import ConfigError

Value = TypeVar("Value", bound=str | int)
PINNED = "pinned by an earlier attempt of this run"


@dataclass(frozen=True)
class Choices:
    """What comes to light while settings are chosen.

    Attributes:
        problems: why this machine cannot run the configuration, one sentence per problem.
        reasons: why a setting has its value, by its name; not of those that the configuration sets.
        given_up: why settings of the run's first attempt are not kept here, one sentence per setting.
    """

    problems: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)

    def choose(
        self,
        name: str,
        requested: Value | Literal["auto"],
        pinned: Value | None,
        rule: Callable[[], tuple[Value, str]],
        fault: Callable[[Value], str] = lambda _: "",
    ) -> Value:
        """The value of a setting. What the configuration sets is taken or refused, never replaced.

        Args:
            requested: by the configuration.
            pinned: by the first attempt, None without one; kept where the configuration leaves the setting open and this machine
                supports it.
            rule: gives the value otherwise, and the reason for it.
            fault: why this machine cannot have a value; "" where it can.
        """
        if requested != "auto":
            self.refuse(fault(requested))
            return requested
        if pinned is not None:
            if not (sentence := fault(pinned)):
                self.reasons[name] = PINNED
                return pinned
            self.given_up.append(sentence)
        value, self.reasons[name] = rule()
        self.refuse(fault(value))
        return value

    def refuse(self, sentence: str) -> None:
        """Add a problem, once; "" is none."""
        if sentence and sentence not in self.problems:
            self.problems.append(sentence)


def refuse(problems: list[str]) -> None:
    """Raise ConfigError with one line per problem, if there is any."""
    if problems:
        raise ConfigError("this machine cannot run the configuration", problems)
