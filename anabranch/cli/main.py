"""The `anabranch` command: one file a verb, registered here."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from anabranch import __version__
from anabranch.cli.bench import app as bench
from anabranch.cli.bench_ab import ab as bench_ab
from anabranch.cli.bench_ops import VERBS as BENCH_OPS
from anabranch.cli.bench_serve import serve as bench_serve
from anabranch.cli.bench_step import VERBS as BENCH_STEP
from anabranch.cli.chat import chat
from anabranch.cli.env import env
from anabranch.cli.eval import app as evaluate
from anabranch.cli.generate import generate
from anabranch.cli.init_checkpoint import init_checkpoint
from anabranch.cli.plan import plan
from anabranch.cli.report import report
from anabranch.cli.serve import serve
from anabranch.cli.trace import app as trace
from anabranch.cli.tune import tune
from anabranch.cli.verify import app as verify
from anabranch.cli.verify_exact import exact as verify_exact


class Verbs(TyperGroup):
    """A ValueError is the user's: one line, status 2. Other errors are ours and keep their traceback; Ctrl-C is 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            typer.echo(f"error: {' '.join(str(error).splitlines())}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    name="anabranch",
    cls=Verbs,
    help="An inference engine for the Kimi hybrid-attention family whose fusions are proven exact.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for verb in (serve, generate, chat, init_checkpoint, plan, tune, env):
    app.command()(verb)
app.add_typer(verify, name="verify")
verify.command()(verify_exact)
app.add_typer(evaluate, name="eval")
app.add_typer(bench, name="bench")
for verb in (*BENCH_OPS, *BENCH_STEP, bench_serve, bench_ab):
    bench.command()(verb)
app.add_typer(trace, name="trace")
app.command()(report)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"anabranch {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options of the command itself."""


def run() -> None:
    """Entry point of the console script."""
    app()
