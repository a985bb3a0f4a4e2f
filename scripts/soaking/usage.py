"""What processes hold and burn, read from /proc; None where the system does not tell."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


def family(pid: int) -> list[int]:
    """A process and its children."""
    found = [pid]
    for entry in _PROC.glob("[0-9]*"):
        stat = _stat(int(entry.name))
        if stat is not None and int(stat[1]) == pid:
            found.append(int(entry.name))
    return found


def _stat(pid: int) -> list[str] | None:
    """Fields from the third on: state, parent, ..."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


@dataclass(frozen=True)
class Level:
    """Memory and files of a server and its engine together."""

    rss_mb: float | None = None
    files: int | None = None

    @classmethod
    def of(cls, pid: int | None) -> "Level":
        if pid is None or _stat(pid) is None:
            return cls()
        rss, files = 0.0, 0
        for each in family(pid):
            held = re.search(r"VmRSS:\s+(\d+)", (_PROC / str(each) / "status").read_text())
            rss += int(held[1]) / 1024 if held else 0.0
            files += len(list((_PROC / str(each) / "fd").iterdir()))
        return cls(rss, files)


@dataclass(frozen=True)
class Burnt:
    """CPU seconds so far: of the server's process, of its children (the engine), and of these clients.

    `starved`: seconds that the engine's threads wanted a core and had none.
    """

    server: float | None = None
    engine: float | None = None
    starved: float | None = None
    clients: float = 0.0

    @classmethod
    def of(cls, pid: int | None) -> "Burnt":
        if pid is None or _stat(pid) is None:
            return cls(clients=time.process_time())
        first, *children = family(pid)
        engine = children or [first]
        return cls(_cpu(first), sum(map(_cpu, children)), sum(map(_starved, engine)), time.process_time())

    def since(self, before: "Burnt", seconds: float) -> str:
        """In cores, on one line."""
        parts = []
        for name in ("server", "engine", "clients", "starved"):
            new, old = getattr(self, name), getattr(before, name)
            if new is not None and old is not None:
                parts.append(f"{name} {(new - old) / seconds:.2f}")
        return ", ".join(parts)


def _cpu(pid: int) -> float:
    stat = _stat(pid)
    return 0.0 if stat is None else (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def _starved(pid: int) -> float:
    """Seconds that runnable threads have waited for a core; 0 where the kernel does not count them."""
    waited = 0
    for task in (_PROC / str(pid) / "task").glob("*/schedstat"):
        try:
            waited += int(task.read_text().split()[1])
        except (OSError, IndexError):
            continue
    return waited / 1e9
