"""One file of training text, made on any machine in a minute: `python -m training.data OUT` from examples/.

Four streams of bytes, each a run of documents that end in one zero byte, compressed by NumPy: `problems` and `text`,
and of each what is held out.
"""

import argparse
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .config import EOS
from .problems import documents
from .text import texts

END = b"\0"
STREAMS = ("problems", "text", "problems_held_out", "text_held_out")
SHARE = 0.65  # of rows that hold word problems
_SEED, _HELD_OUT_SEED = 11, 12
_HELD_OUT_BYTES = 600_000


def build(out: Path, problem_bytes: int) -> dict[str, int]:
    """Write the four streams to `out`; returns their sizes."""
    streams = {
        "problems": _joined(documents(_SEED, problem_bytes, held_out=False)),
        "text": _joined(texts(held_out=False)),
        "problems_held_out": _joined(documents(_HELD_OUT_SEED, _HELD_OUT_BYTES, held_out=True)),
        "text_held_out": _joined(texts(held_out=True)),
    }
    about = {"python": platform.python_version(), "bytes": {name: len(stream) for name, stream in streams.items()}}
    with out.open("wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **streams)  # pyright: ignore[reportArgumentType]
    return about["bytes"]


def _joined(parts: Iterable[str]) -> np.ndarray:
    raw = b"".join(part.encode().replace(END, b"") + END for part in parts if part)
    return np.frombuffer(raw, np.uint8)


@dataclass(frozen=True)
class Stream:
    """Bytes on a device, and where a row may start: at documents, or anywhere in texts longer than a row."""

    data: torch.Tensor
    starts: np.ndarray

    @classmethod
    def of(cls, data: np.ndarray, length: int, at_documents: bool, device: torch.device | str) -> "Stream":
        """ValueError: fewer bytes than one row needs."""
        last = len(data) - length - 1
        if last < 0:
            raise ValueError(f"a stream of {len(data)} bytes is too short for rows of {length}")
        starts = np.concatenate([[0], np.flatnonzero(data == END[0]) + 1]) if at_documents else np.arange(last + 1)
        return cls(torch.from_numpy(data.copy()).to(device), starts[starts <= last])


class Rows:
    """Rows of length + 1 tokens from a mixture of streams, of which one tensor says where each row starts.

    `positions` int64 [rows] lies on the device; `choose` fills it and `take` gathers, so that a captured step can be
    given other rows. All streams share one tensor. `about` says what made the file.
    """

    def __init__(self, streams: dict[str, Stream], rows: int, length: int, about: dict[str, Any] | None = None) -> None:
        first, offset = next(iter(streams.values())), 0
        self.length, self.device, self.about = length, first.data.device, about or {}
        self.data = torch.cat([stream.data for stream in streams.values()])
        self.starts: dict[str, np.ndarray] = {}
        for name, stream in streams.items():
            self.starts[name] = stream.starts + offset
            offset += len(stream.data)
        self.positions = torch.zeros(rows, dtype=torch.long, device=self.device)
        self._reach = torch.arange(length + 1, device=self.device)

    @classmethod
    def load(cls, file: Path, rows: int, length: int, device: torch.device | str) -> "Rows":
        """ValueError: the file is missing or holds something else."""
        try:
            with np.load(file) as archive:
                found, about = {name: archive[name] for name in STREAMS}, json.loads(str(archive["about"]))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{file}: need a file written by training.data ({error})") from None
        streams = {n: Stream.of(data, length, n.startswith("problems"), device) for n, data in found.items()}
        return cls(streams, rows, length, about)

    def choose(self, generator: np.random.Generator, held_out: str | None = None) -> None:
        """Draw starts: of training rows a share of SHARE are problems, held-out rows are of one stream alone."""
        count = len(self.positions)
        names = [held_out] * count
        if held_out is None:
            names = ["problems" if u < SHARE else "text" for u in generator.random(count)]
        drawn = [self.starts[name][generator.integers(len(self.starts[name]))] for name in names]
        self.positions.copy_(torch.tensor(np.array(drawn, np.int64)), non_blocking=True)

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each int64 [rows, length]."""
        found = self.data[self.positions[:, None] + self._reach].long()
        tokens = torch.where(found == END[0], EOS, found)
        return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, default=110, help="of word problems")
    options = parser.parse_args()
    sizes = build(options.out, int(options.megabytes * 1e6))
    print(json.dumps(sizes | {"file": options.out.stat().st_size}))


if __name__ == "__main__":
    main()
