"""`serve` and `generate` with several ranks, as commands: what a lost or hanging rank does to clients and the job."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from anabranch import LLM, SamplingParams
from anabranch.models.tiny import init_checkpoint

COMMAND = [sys.executable, "-c", "from anabranch.cli.main import run; run()"]
LONG = {"prompt": "Hi", "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "tiny-kl"
    init_checkpoint("kl", path)
    return path


@contextmanager
def serving(checkpoint, *options):
    command = [*COMMAND, "serve", str(checkpoint), "--device", "cpu", "--port", "0", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        line = process.stdout.readline()
        found = re.search(r"serving at (http://127\.0\.0\.1:\d+)/v1$", line)
        assert found, line + process.stderr.read()
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if int(parent) == pid and state != "Z" and "spawn_main" in command:
            found.append(int(entry.name))
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (signal.SIGKILL, "rank 1 was ended by SIGKILL"),
        (signal.SIGSTOP, r"a step has taken \d+ s \(rank_timeout=3\): rank"),
    ],
    ids=["killed", "stopped"],
)
def test_a_lost_rank_ends_every_answer_and_the_job(checkpoint, how, words):
    with serving(checkpoint, "--tp", "2", "--max-len", "4096", "--rank-timeout", "3") as (process, url):
        info = httpx.get(f"{url}/server_info").json()
        assert [(r["rank"], r["place"]["attn_tp_size"]) for r in info["ranks"]] == [(0, 2), (1, 2)]
        # the split sizes of both ranks: 8 heads of 16 over two
        for rank in info["ranks"]:
            assert rank["fusions"]["kda"]["rows"][0]["q_proj"] == 64
            assert rank["fusions"]["kda"]["chosen"] == "whole"
        found = []
        ask = threading.Thread(target=lambda: found.append(httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)))
        ask.start()
        time.sleep(1)
        [engine] = children(process.pid)
        [rank] = children(engine)
        os.kill(rank, how)
        lost = time.monotonic()
        ask.join(30)
        assert time.monotonic() - lost < 15
        assert found[0].status_code == 500
        assert re.search(words, found[0].json()["error"]["message"])
        assert process.wait(15) == 1
        assert re.search(rf"error: the engine failed: .*{words}", process.stderr.read())
        assert gone(engine)
        assert gone(rank)


def test_the_server_ends_in_order_and_leaves_no_rank(checkpoint):
    with serving(checkpoint, "--tp", "2", "--dp-attention", "2", "--ep", "2") as (process, url):
        [engine] = children(process.pid)
        [rank] = children(engine)
        answers = [httpx.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 3}, timeout=60) for _ in range(2)]
        assert [a.status_code for a in answers] == [200, 200]
        loads = httpx.get(f"{url}/v1/loads").json()
        assert (loads["dp_rank_count"], [load["dp_rank"] for load in loads["loads"]]) == (2, [0, 1])
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(30) == 0
        assert gone(engine)
        assert gone(rank)
        [line] = process.stderr.read().splitlines()
        assert line.startswith("memory: ")


def test_two_nodes_of_torchrun_answer_as_one_process(checkpoint):
    """The recipe of docs/operations.md: an agent a node, which meet at the first; only rank 0 writes the answer."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    ask = ["generate", str(checkpoint), "Hi", "--device", "cpu", "--temperature", "0", "-n", "5", "--json"]
    nodes = [
        subprocess.Popen(
            [*agent, "--no-python", *COMMAND, *ask, "--tp", "2", "--dp-attention", "2", "--ep", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [node.communicate(timeout=90) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    [answer] = [out for out, _ in said if out]
    params = SamplingParams(temperature=0.0, max_tokens=5)
    [alone] = LLM(checkpoint, device="cpu").generate("Hi", params)
    assert json.loads(answer)["token_ids"] == alone.outputs[0].token_ids


def test_another_number_of_processes_than_ranks_is_one_line(checkpoint):
    run = subprocess.run(
        [*COMMAND, "generate", str(checkpoint), "Hi", "--device", "cpu", "--tp", "2"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "4"},
    )
    assert run.returncode == 2
    assert run.stderr == "error: WORLD_SIZE=4: the layout (tp x pp) has 2 ranks; start one process for each\n"
