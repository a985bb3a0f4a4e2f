"""`anabranch serve` as a process: its first line, and its end."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

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
    # a group of its own, as a shell gives to what it starts
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"tiny-k3: serving at (http://127\.0\.0\.1:\d+)/v1$", line)
        assert found, line + (process.stderr.read() if process.stderr else "")
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def children(pid: int) -> dict[int, str]:
    """Process id -> command line of every child that runs."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def engine_of(process: subprocess.Popen) -> int:
    [pid] = [pid for pid, command in children(process.pid).items() if "spawn_main" in command]
    return pid


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


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
        engine = engine_of(process)
        thread, found = in_background(lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=30))
        # a terminal sends it to both
        os.killpg(process.pid, signal.SIGINT)
        thread.join(15)
        assert found[0].status_code == 503
        assert "shutting down" in found[0].json()["error"]["message"]
        assert process.wait(15) == 130
        assert gone(engine)
        [line] = process.stderr.read().splitlines()
        assert line.startswith("memory: ")


def test_a_killed_engine_ends_every_answer_and_the_server(checkpoints):
    with serving(checkpoints["k3"]) as (process, url):
        endless = {**LONG, "max_tokens": 3000}
        streamed, events = in_background(
            lambda: httpx.post(f"{url}/v1/completions", json={**endless, "stream": True}, timeout=30)
        )
        whole, answer = in_background(lambda: httpx.post(f"{url}/v1/completions", json=endless, timeout=30))
        os.kill(engine_of(process), signal.SIGKILL)
        killed = time.monotonic()
        for thread in (streamed, whole):
            thread.join(5)
        reason = "the engine failed: its process was ended by SIGKILL (was memory short?)"
        assert answer[0].status_code == 500
        assert answer[0].json()["error"]["message"] == reason
        last = json.loads(events[0].text.strip().rpartition("data: ")[2])
        assert (events[0].status_code, last["error"]["message"]) == (200, reason)
        # routers see it before the end
        assert httpx.get(f"{url}/health").status_code == 503
        late = httpx.post(f"{url}/v1/completions", json=LONG)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_error")
        assert httpx.post(f"{url}/flush_cache").status_code == 503
        assert process.wait(10) == 1
        assert time.monotonic() - killed < 10
        assert process.stderr.read().splitlines()[1:] == [f"error: {reason}"]


def test_a_killed_server_takes_its_engine_along(checkpoints):
    with serving(checkpoints["k3"]) as (process, url):

        def ask():
            with pytest.raises(httpx.HTTPError):
                httpx.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 3000}, timeout=30)

        thread, _ = in_background(ask)
        engine = engine_of(process)
        process.kill()
        end = time.monotonic() + 10
        while not gone(engine):
            assert time.monotonic() < end, "the engine was left behind"
            time.sleep(0.02)
        thread.join(10)


def test_a_supervisor_may_send_sigterm_to_the_whole_group(checkpoints):
    with serving(checkpoints["k3"]) as (process, url):
        engine = engine_of(process)
        thread, found = in_background(lambda: httpx.post(f"{url}/v1/completions", json=LONG, timeout=30))
        os.killpg(process.pid, signal.SIGTERM)
        thread.join(20)
        assert (found[0].status_code, found[0].json()["usage"]["completion_tokens"]) == (200, 100)
        assert process.wait(15) == 0
        assert gone(engine)


def serve_once(*words):
    command = [sys.executable, "-c", LAUNCH, "serve", *map(str, words), "--port", "0"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_what_the_engine_refuses_is_one_line(checkpoints):
    result = serve_once(checkpoints["k3"], "--memory-fraction", "1e-9")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: max_seqs=16 of ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--parser", "qwen"), "parser='qwen': need one of kimi, none"),
        (("--host", "256.0.0.1"), "cannot listen on 256.0.0.1"),
        (("--port", "99999"), "port=99999"),
        (("--body-timeout", "0"), "body_timeout_s=0.0: need a positive number"),
        ((), "no tokenizer.json"),
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


def test_a_directory_that_is_not_there(tmp_path):
    result = serve_once(tmp_path / "nothing")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: {tmp_path / 'nothing'}: no such directory; need a checkpoint directory\n"
    file = tmp_path / "file"
    file.touch()
    assert "not a directory" in serve_once(file).stderr
