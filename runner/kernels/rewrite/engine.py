"""How rules are applied: each yields where it fits and where it is refused; the engine applies, records, and asks again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from runner.kernels.rewrite.draft import Draft

_MOST_APPLICATIONS = 10_000  # of one rule to one graph: past it, a rule undoes itself


@dataclass(frozen=True)
class Match:
    """A place where a rule fits.

    Attributes:
        where: the place in the model's code.
        what: what becomes of it, in a few words.
        rewrite: does it.
    """

    where: str
    what: str
    rewrite: Callable[[], None]


@dataclass(frozen=True)
class Refusal:
    """A place where a rule is tempting, and would change the answer.

    Attributes:
        where: the place in the model's code.
        what: what is not done.
        reason: why.
    """

    where: str
    what: str
    reason: str


@dataclass(frozen=True)
class Step:
    """What a rule did (or, with a reason, refused to do) at a place."""

    rule: str
    where: str
    what: str
    reason: str = ""

    def __str__(self) -> str:
        refused = f"refused: {self.reason}" if self.reason else ""
        return f"{self.rule:12} {self.where:24} {self.what}{'; ' if refused else ''}{refused}"


class Rule(Protocol):
    """A rewrite.

    Attributes:
        name: as in the catalogue, such as ``T5 softmax``.
        family: what an ablation switches off together.
    """

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> str: ...

    def find(self, draft: Draft) -> Iterator[Match | Refusal]:
        """Yield where it fits, and where it is refused. After the first match is applied it is asked anew."""
        ...


def apply_all(rules: Sequence[Rule], draft: Draft) -> list[Step]:
    """Apply each rule, in turn, wherever it fits; return what was done and what was refused."""
    steps: list[Step] = []
    for rule in rules:
        for _ in range(_MOST_APPLICATIONS):
            found = next((entry for entry in rule.find(draft) if isinstance(entry, Match)), None)
            if found is None:
                break
            found.rewrite()
            draft.prune()
            steps.append(Step(rule.name, found.where, found.what))
        else:
            raise AssertionError(f"{rule.name} never ends")
        refused = [entry for entry in rule.find(draft) if isinstance(entry, Refusal)]
        steps += [Step(rule.name, entry.where, entry.what, entry.reason) for entry in dict.fromkeys(refused)]
    return steps
