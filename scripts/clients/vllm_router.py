"""Two replicas behind vllm-router: requests are split, streams pass, one replica is killed and brought back.

    python3 -m venv VENV && VENV/bin/pip install vllm-router==0.1.17
    anabranch init-checkpoint kl
    python scripts/clients/vllm_router.py VENV/bin/vllm-router tiny-kl

Replicas are CPU servers of this package on free ports. Exit status 0 only if every request was answered, both replicas
had their share before the kill and after the return, and a stream came in more than one piece.
"""

import re
import socket
import subprocess
import sys
import time

import httpx

SERVE = [sys.executable, "-c", "from anabranch.cli.main import run; run()", "serve"]
QUICK = ["--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1"]
QUICK += ["--cb-timeout-duration-secs", "2", "--cb-failure-threshold", "2", "--cb-success-threshold", "1"]
PARAMS = {"prompt": "Hi", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def start(checkpoint: str, port: int = 0) -> tuple[subprocess.Popen, str]:
    """A replica, and its URL once it serves."""
    command = [*SERVE, checkpoint, "--device", "cpu", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"serving at (http://127\.0\.0\.1:\d+)/v1", process.stdout.readline())
    if not found:
        sys.exit("a replica did not start")
    return process, found[1]


def answered(url: str) -> int:
    """Answers that a replica has completed."""
    stats = httpx.get(f"{url}/server_info", timeout=30).json()["stats"]
    return sum(stats["finished"].values())


def ask(router: str, count: int) -> int:
    """How many of `count` requests were answered in full."""
    done = 0
    for _ in range(count):
        reply = httpx.post(f"{router}/v1/completions", json=PARAMS, timeout=60)
        done += reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == PARAMS["max_tokens"]
    return done


def pieces(router: str) -> int:
    """Events of a streamed answer that carry text."""
    body = {**PARAMS, "max_tokens": 12, "stream": True}
    with httpx.stream("POST", f"{router}/v1/completions", json=body, timeout=60) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
    return len(lines)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def until_healthy(router: str) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            if httpx.get(f"{router}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > end:
            sys.exit("the router did not become healthy")
        time.sleep(0.2)


def main(router_command: str, checkpoint: str) -> int:
    (first, url_1), (second, url_2) = start(checkpoint), start(checkpoint)
    port, metrics = free_port(), free_port()
    command = [router_command, "--worker-urls", url_1, url_2, "--policy", "round_robin", "--host", "127.0.0.1"]
    router = subprocess.Popen([*command, "--port", str(port), "--prometheus-port", str(metrics), *QUICK])
    url, faults = f"http://127.0.0.1:{port}", 0
    try:
        until_healthy(url)
        ok, split = ask(url, 12), (answered(url_1), answered(url_2))
        faults += ok != 12 or min(split) < 4
        events = pieces(url)
        faults += events < 3
        print(f"both: {ok} of 12 answered, split {split}; a stream came in {events} events", flush=True)
        second.kill()
        second.wait()
        ok = ask(url, 12)
        faults += ok != 12
        print(f"one killed: {ok} of 12 answered", flush=True)
        second, url_2 = start(checkpoint, int(url_2.rpartition(":")[2]))
        back = time.monotonic()
        while not answered(url_2) and time.monotonic() < back + 120:
            faults += ask(url, 1) != 1
        print(f"brought back: used again after {time.monotonic() - back:.0f} s, {faults} faults", flush=True)
        faults += not answered(url_2)
    finally:
        for process in (router, first, second):
            process.terminate()
            process.wait(60)
    return 1 if faults else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} VLLM_ROUTER CHECKPOINT")
    sys.exit(main(sys.argv[1], sys.argv[2]))
