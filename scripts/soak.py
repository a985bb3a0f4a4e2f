"""Loads a server of its own with many streams and with clients that misbehave, and checks that only those notice.

    python scripts/soak.py tiny-k3 --streams 200 --seconds 60

Three phases of the same length, in turn and as often as --rounds says: good clients alone; beside clients that are
refused, which must cost nothing; beside bad clients of every kind, of which some are admitted, take their share of the
steps and leave. Exit status 1 unless every good request got all its tokens (the same ones each time, with
--deterministic), every bad one the right status, good clients and engine kept their throughput, and no slot, page,
connection or memory is held at the end.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from soaking.bad import BAD, CONTEXT, REFUSED
from soaking.exchange import Target, get
from soaking.load import Load
from soaking.report import PHASES, Report
from soaking.usage import Level

LEAST = {"refused rate": 0.9, "mixed engine_rate": 0.9, "mixed rate": 0.8}


async def soak(
    target: Target,
    *,
    streams: int,
    seconds: float,
    copies: int = 1,
    rounds: int = 1,
    least: Mapping[str, float] = LEAST,
    rss_limit_mb: float = 256.0,
    pid: int | None = None,
) -> Report:
    """Load the server in all phases, `seconds` each, and look at what is left."""
    load = Load(target, streams=streams, pid=pid)
    load.repeatable = bool(json.loads(await get(target.port, "/server_info"))["deterministic"])
    levels = {"start": Level.of(pid)}
    await load.phase(min(2.0, seconds / 4))  # the first steps allocate
    levels["warming up"] = Level.of(pid)
    phases = {name: [] for name in PHASES}
    for _ in range(rounds):
        phases["alone"].append(await load.phase(seconds))
        levels.setdefault("alone", Level.of(pid))
        phases["refused"].append(await load.phase(seconds, copies, REFUSED))
        phases["mixed"].append(await load.phase(seconds, copies, BAD))
    leaks = await load.leaks()
    await asyncio.sleep(0.5)  # closed connections leave the server's table
    levels["end"] = Level.of(pid)
    return Report(phases, load.bad, load.wrong, leaks, levels, least, rss_limit_mb)


@contextmanager
def serving(options: list[str]) -> Iterator[tuple[subprocess.Popen[str], int, list[str]]]:
    """A server of our own: its process, its port, and a list that takes its log once it has ended."""
    command = [sys.executable, "-c", "from anabranch.cli.main import run; run()", "serve", *options, "--port", "0"]
    # more threads than that only wait for each other at this size
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    said: list[str] = []
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as server,
    ):
        try:
            assert server.stdout is not None
            found = re.search(r"serving at http://127\.0\.0\.1:(\d+)/v1", server.stdout.readline())
            yield server, int(found[1]) if found else 0, said
        finally:
            server.kill()
            server.wait()
            log.seek(0)
            said += log.read().splitlines()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="directory, e.g. of anabranch init-checkpoint k3")
    parser.add_argument("--streams", type=int, default=200, help="good clients at once (200)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each phase (60)")
    parser.add_argument("--rounds", type=int, default=1, help="how often all phases are run; medians count (1)")
    parser.add_argument("--copies", type=int, default=2, help="clients of each bad kind (2)")
    parser.add_argument("--max-seqs", type=int, help="answers computed at once (as many as streams)")
    parser.add_argument("--deterministic", action="store_true", help="also compare the answers to equal requests")
    for name, default in LEAST.items():
        option = f"--least-{name.replace(' ', '-').replace('_', '-')}"
        parser.add_argument(option, type=float, default=default, help=f"share to keep of the rate alone ({default})")
    parser.add_argument("--rss-limit-mb", type=float, default=256.0, help="growth allowed beside bad clients (256)")
    return parser.parse_args()


def main() -> int:
    """Run the soak and print its report."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server ends with us
    command = [args.checkpoint, "--max-seqs", str(args.max_seqs or args.streams), "--max-len", str(CONTEXT)]
    command += ["--prefill-chunk", "256", *(["--deterministic"] if args.deterministic else [])]
    report = None
    with serving(command) as (server, port, said):
        if port:
            options = {"streams": args.streams, "seconds": args.seconds, "copies": args.copies, "rounds": args.rounds}
            least = {name: getattr(args, f"least_{name.replace(' ', '_')}") for name in LEAST}
            run = soak(Target(port), **options, least=least, rss_limit_mb=args.rss_limit_mb, pid=server.pid)
            report = asyncio.run(run)
    if report is None:
        print(f"the server did not start: {' '.join(said)}", file=sys.stderr)
        return 1
    report.leaks += [f"the server logged {n} tracebacks" for n in ["\n".join(said).count("Traceback")] if n]
    print(report)
    return 1 if report.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
