"""Open a trace by what is in the file, not by what it is called."""

import gzip
from pathlib import Path

from anabranch.evidence.trace.chrome import load_chrome
from anabranch.evidence.trace.events import Trace
from anabranch.evidence.trace.nsys import load_nsys

ACCEPTED = "accepted are an Nsight Systems SQLite export and a torch.profiler Chrome trace (.json, .json.gz)"


def load_trace(path: Path | str, on: str = "auto") -> Trace:
    """`on`: "gpu", "cpu" (host operations) or "auto", the GPU where it did anything. ValueError in one line."""
    if on not in ("auto", "gpu", "cpu"):
        raise ValueError(f"on={on!r}: accepted are auto, gpu, cpu")
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if head.startswith(b"SQLite format 3\0"):
        if on == "cpu":
            raise ValueError(f"{path}: on='cpu' needs a torch.profiler trace, this is an Nsight Systems export")
        return load_nsys(path)
    if head.startswith(b"\x1f\x8b"):
        return load_chrome(path, _unzipped(path), on)
    if head.lstrip().startswith((b"{", b"[")):
        return load_chrome(path, path.read_bytes(), on)
    hint = "; make one with: nsys export --type sqlite FILE" if path.suffix in (".nsys-rep", ".qdrep") else ""
    raise ValueError(f"{path}: not a trace that can be read; {ACCEPTED}{hint}")


def _unzipped(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: broken gzip file ({error})") from None
