"""`anabranch serve` as a process: its first line, and its end."""

import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
import typer
from typer.testing import CliRunner

from anabranch.cli.main import Verbs
from anabranch.cli.serve import serve

LAUNCH = """
import typer
from anabranch.cli.main import Verbs
from anabranch.cli.serve import serve

app = typer.Typer(cls=Verbs, pretty_exceptions_enable=False)
app.callback()(lambda: None)
app.command()(serve)
app()
"""
LONG = {"prompt": "Hi", "max_tokens": 100, "ignore_eos": True}


@contextmanager
def serving(checkpoint, *options):
    command = [sys.executable, "-c", LAUNCH, "serve", str(checkpoint), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"tiny-k3: serving at (http://127\.0\.0\.1:\d+)/v1$", line)
        assert found, line + (process.stderr.read() if process.stderr else "")
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def in_background(ask):
    found = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    time.sleep(0.5)
    return thread, found


def test_sigterm_lets_answers_end(checkpoints):
    with serving(checkpoints["k3"]) as (process, url):
        body = {**LONG, "stream": True}
        thread, found = in_background(lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=30))
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        # still there for routers that ask, and for nobody else
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.post(f"{url}/v1/completions", json=LONG).status_code == 503
        thread.join(30)
        assert found[0].text.endswith("data: [DONE]\n\n")
        assert process.wait(15) == 0
        # the memory plan, and nothing else
        [line] = process.stderr.read().splitlines()
        assert line.startswith("memory: ")


def test_ctrl_c_ends_answers_that_take_too_long(checkpoints):
    with serving(checkpoints["k3"], "--drain", "0.2") as (process, url):
        body = {**LONG, "max_tokens": 3000}
        thread, found = in_background(lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=30))
        process.send_signal(signal.SIGINT)
        thread.join(15)
        assert found[0].status_code == 503
        assert "shutting down" in found[0].json()["error"]["message"]
        assert process.wait(15) == 130


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--parser", "qwen"), "parser='qwen': need one of kimi, none"),
        (("--host", "256.0.0.1"), "cannot listen on 256.0.0.1"),
        (("--port", "99999"), "port=99999"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, options, words):
    app = typer.Typer(cls=Verbs, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    app.command()(serve)
    result = CliRunner().invoke(app, ["serve", str(tmp_path), *options])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
