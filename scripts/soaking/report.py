"""Everything that a soak saw, and the judgement on it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from soaking.bad import BAD
from soaking.load import Phase
from soaking.usage import Level

# name of the kind of phase -> what good clients share the server with
PHASES = {
    "alone": "good clients alone",
    "refused": "beside clients that are refused",
    "mixed": "beside bad clients of every kind",
}


@dataclass
class Report:
    """Everything that was seen; `failures` judges it. `phases` holds one phase of each kind for every round."""

    phases: Mapping[str, Sequence[Phase]]
    bad: Counter[str]
    wrong: Counter[str]
    leaks: list[str]
    levels: Mapping[str, Level]
    least: Mapping[str, float]
    rss_limit_mb: float

    def ratio(self, kind: str, rate: str = "rate") -> float:
        """Tokens a second beside the clients of `kind`, as a share of those alone; medians over the rounds."""
        alone, beside = (median(getattr(phase, rate) for phase in self.phases[name]) for name in ("alone", kind))
        return beside / alone if alone else 0.0

    def failures(self) -> list[str]:
        """One line for everything that is not as it should be."""
        found = [
            f"good, {kind}: {n} x {what}"
            for kind, phases in self.phases.items()
            for phase in phases
            for what, n in phase.problems.items()
        ]
        found += [f"bad: {n} x {what}" for what, n in self.wrong.items()]
        found += [f"never tried: {name}" for name in BAD if not self.bad[name]]
        found += self.leaks
        for kind, rate, what in _RATIOS:
            least = self.least[f"{kind} {rate}"]
            if (ratio := self.ratio(kind, rate)) < least:
                found.append(f"{PHASES[kind]}, {what} kept {ratio:.2f} of the throughput; need {least:g}")
        before, after = self.levels["alone"], self.levels["end"]
        if before.rss_mb and after.rss_mb and after.rss_mb - before.rss_mb > self.rss_limit_mb:
            found.append(f"memory grew from {before.rss_mb:.0f} to {after.rss_mb:.0f} MiB beside bad clients")
        if before.files and after.files and after.files > before.files:
            found.append(f"open files grew from {before.files} to {after.files}")
        return found

    def __str__(self) -> str:
        lines = [f"{kind}: {phase.line()}" for kind, phases in self.phases.items() for phase in phases]
        lines += [f"{kind} / alone: {what} {self.ratio(kind, rate):.2f}" for kind, rate, what in _RATIOS]
        lines += [f"bad {name}: {n}" for name, n in sorted(self.bad.items())]
        for name, level in self.levels.items():
            if level.rss_mb is not None:
                lines.append(f"after {name}: {level.rss_mb:.0f} MiB resident, {level.files} open files")
        failures = self.failures()
        return "\n".join([*lines, *(f"FAILED: {line}" for line in failures), "FAILED" if failures else "ok"])


# clients that leave were admitted and take steps, so that beside them good clients get what is fair, and no more
_RATIOS = (
    ("refused", "rate", "good clients"),
    ("mixed", "engine_rate", "the engine"),
    ("mixed", "rate", "good clients"),
)
