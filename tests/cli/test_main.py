"""The command itself: verbs, exit statuses, and what a plain `--help` costs."""

import re
import signal
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import typer
from helpers.configs import K3_FILE
from typer.testing import CliRunner

from anabranch import __version__
from anabranch.cli.main import Verbs, app, run


def invoke(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def shell(*words, **options):
    command = [sys.executable, "-c", "from anabranch.cli.main import run; run()", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def failing(error):
    """A command line whose only verb raises `error`."""
    broken = typer.Typer(cls=Verbs, pretty_exceptions_enable=False)

    @broken.callback()
    def _group() -> None: ...

    @broken.command()
    def fail() -> None:
        raise error

    return CliRunner().invoke(broken, ["fail"])


def test_the_console_script_is_this_run():
    [script] = [e for e in entry_points(group="console_scripts") if e.name == "anabranch"]
    assert script.load() is run


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"anabranch {__version__}\n")


@pytest.mark.parametrize("verb", ["generate", "chat", "init-checkpoint", "plan", "tune", "bench", "env"])
def test_every_verb_has_a_line_of_help(verb):
    assert re.search(rf"^  {verb} +\S.*\.$", invoke("--help").stdout, re.MULTILINE)
    assert invoke(verb, "--help").exit_code == 0


def test_usage_errors_are_status_2():
    for words in ([], ["nonsense"], ["plan"], ["plan", "x", "--nonsense"], ["plan", "x", "--tp", "two"]):
        result = invoke(*words)
        assert result.exit_code == 2, words
        assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_value_error_is_one_line_and_status_2():
    result = failing(ValueError("first\nsecond"))
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: first second\n")


def test_an_interrupt_is_quiet_and_status_130():
    result = failing(KeyboardInterrupt())
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize("error", [RuntimeError("ours"), AssertionError("ours"), OSError(5, "ours"), KeyError("ours")])
def test_every_other_error_keeps_its_traceback(error):
    result = failing(error)
    assert result.exit_code == 1
    assert result.exception is error


def test_help_does_not_import_torch():
    code = "import sys, anabranch.cli.main; sys.exit(' '.join({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr == "\n"


def test_a_real_process_plans():
    done = shell("plan", K3_FILE, "--tp", 16, "--dp-attention", 16, "--ep", 16)
    assert (done.returncode, done.stderr) == (0, "")
    assert "QKVG split 36864 | 12288" in done.stdout


def test_a_real_process_refuses(tmp_path):
    done = shell("plan", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path}/config.json: no such file; need a Hugging Face config.json\n"


def test_a_real_process_is_interrupted():
    code = (
        "import os, signal\n"
        "from anabranch.cli import main\n"
        "def verb(): os.kill(os.getpid(), signal.SIGINT); signal.pause()\n"
        "main.app.command('wait')(verb)\n"
        "main.run()"
    )
    command = [sys.executable, "-c", code, "wait"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


PLAN_OPTIONS = (
    "--tp --dp-attention --ep --pp --fusion --dtype --state-dtype --rank --memory --len --lora --explain --json --help"
)


def test_the_options_of_plan_and_env_are_frozen():
    for verb, options in (("plan", PLAN_OPTIONS), ("env", "--json --help")):
        assert re.findall(r"^  (--[a-z-]+)", invoke(verb, "--help").stdout, re.MULTILINE) == options.split()
