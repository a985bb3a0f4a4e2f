"""Progress of long work: bars with the time left on a terminal, a line a run elsewhere. Both on standard error."""

import time
from types import TracebackType
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.progress import TaskID

    from anabranch.evidence.rundir import RunName


class Watch:
    """Shows how far a comparison is; `with` keeps the bars on the screen."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._plain, self._begun = not console.is_terminal, time.monotonic()
        self._runs: TaskID | None = None
        self._steps: TaskID | None = None
        self._what = ""

    def __enter__(self) -> "Watch":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def run(self, run: "RunName", done: int, total: int) -> None:
        """The run that begins now."""
        if self._plain:
            spent = time.monotonic() - self._begun
            left = f", about {spent / done * (total - done):.0f} s left" if done else ""
            typer.echo(f"{run.label} ({run.arm}), run {done + 1} of {total}{left}", err=True)
        if self._runs is None:
            self._runs = self._bars.add_task("runs", total=total)
        self._bars.update(self._runs, completed=done, description=f"{run.label} ({run.arm})")

    def step(self, what: str, done: int, total: int) -> None:
        """Requests that are done."""
        if self._steps is None or what != self._what:
            if self._steps is not None:
                self._bars.remove_task(self._steps)
            self._steps, self._what = self._bars.add_task(what, total=total), what
        self._bars.update(self._steps, completed=done)
