"""Better, worse or inconclusive: what pairs of interleaved arms can tell, and what they could have told.

A pair is a baseline and a candidate that ran one after the other, so that what the machine did at that hour is in both.
What counts is the logarithm of their ratio; its mean over the pairs has Student's t interval with n - 1 degrees of
freedom. The verdict is the side of 1 on which all of the interval lies, and inconclusive when 1 is inside.

The interval is a 98 % one: of comparisons in which nothing has changed one in fifty is called a change. Of ten pairs
whose arms are each off by up to 15 %, at least 19 of 20 are called worse when the drive has lost a fifth of its rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

CONFIDENCE = 0.98
POWER = 0.9
"""How often the smallest effect that could have been shown would have been."""
METHOD = f"Student's t interval, {CONFIDENCE:.0%}, of the mean log-ratio of interleaved pairs"

Word = Literal["better", "worse", "inconclusive"]


@dataclass(frozen=True)
class Verdict:
    """ratio: candidate over baseline, geometric mean; low and high: its interval; both None where there is none.

    smallest: the change, as a part of the baseline, that as many pairs with this scatter would have shown nine times of
    ten; None for fewer than two pairs, which show nothing however large.
    """

    word: Word
    pairs: int
    ratio: float | None
    low: float | None
    high: float | None
    smallest: float | None

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "method": METHOD}

    def __str__(self) -> str:
        if self.ratio is None or self.low is None or self.high is None or self.smallest is None:
            return f"{self.word}: {self.pairs} pair{'s' * (self.pairs != 1)} can show nothing"
        return (
            f"{self.word}: {self.ratio - 1:+.1%} ({self.low - 1:+.1%} to {self.high - 1:+.1%}) in {self.pairs} pairs, "
            f"which could have shown {self.smallest:.1%}"
        )


def compare(baseline: Sequence[float], candidate: Sequence[float], *, more_is_better: bool = False) -> Verdict:
    """Judge pairs of positive measurements, seconds unless `more_is_better`. Raises ValueError for what is no pair."""
    if len(baseline) != len(candidate) or not all(0 < value < math.inf for value in (*baseline, *candidate)):
        raise ValueError(f"pairs of positive numbers were expected, not {baseline!r} and {candidate!r}")
    logs = [math.log(after / before) for before, after in zip(baseline, candidate, strict=True)]
    n = len(logs)
    if n < 2:
        return Verdict("inconclusive", n, math.exp(logs[0]) if logs else None, None, None, None)
    from scipy.stats import t  # type: ignore[import-untyped,unused-ignore]

    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(n)
    reach, more = (float(t.ppf(q, n - 1)) for q in (0.5 + CONFIDENCE / 2, POWER))
    low, high = mean - reach * error, mean + reach * error
    if low <= 0 <= high:
        word: Word = "inconclusive"
    else:
        word = "better" if (mean > 0) == more_is_better else "worse"
    smallest = math.expm1((reach + more) * error)
    return Verdict(word, n, math.exp(mean), math.exp(low), math.exp(high), smallest)


def compare_arms(
    results: Sequence[Mapping[str, Any]], baseline: str, candidate: str, figure: str, *, more_is_better: bool = False
) -> dict[str, Any]:
    """Judge two arms by name, round by round, where neither is void and both have the figure. As JSON."""
    values = {
        (result["arm"], result["round"]): result["figures"][figure]
        for result in results
        if not result["void"] and result["figures"].get(figure) is not None
    }
    rounds = sorted(number for name, number in values if name == baseline and (candidate, number) in values)
    sides = ([values[name, number] for number in rounds] for name in (baseline, candidate))
    verdict = compare(*sides, more_is_better=more_is_better)
    return {"baseline": baseline, "candidate": candidate, "figure": figure, "said": str(verdict), **verdict.record()}
