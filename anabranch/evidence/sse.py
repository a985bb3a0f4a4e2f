"""Server-sent events from bytes that may be cut anywhere."""

from collections.abc import Iterator

_BOM = b"\xef\xbb\xbf"


class EventParser:
    """Takes bytes as they arrive and gives the data of each complete event.

    Lines end in LF, CRLF or CR; comments and fields other than `data` are left out; several data lines of one event are
    joined by LF, as the standard says. An event is complete when its empty line is.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._begun = self._skip_lf = False

    def feed(self, piece: bytes) -> Iterator[str]:
        """Data of every event that `piece` completes."""
        self._rest += piece
        if not self._begun:
            if len(self._rest) < len(_BOM) and _BOM.startswith(self._rest):
                return
            self._rest, self._begun = self._rest.removeprefix(_BOM), True
        for line in self._lines():
            if line:
                self._field(line)
            elif self._data:
                yield b"\n".join(self._data).decode("utf-8", "replace")
                self._data = []

    def _lines(self) -> Iterator[bytes]:
        while self._rest:
            if self._skip_lf:  # the LF of a CRLF whose CR has ended a line already
                self._rest, self._skip_lf = self._rest.removeprefix(b"\n"), False
                continue
            ends = [at for at in (self._rest.find(b"\n"), self._rest.find(b"\r")) if at >= 0]
            if not ends:
                return
            end = min(ends)
            line, self._skip_lf = self._rest[:end], self._rest[end : end + 1] == b"\r"
            self._rest = self._rest[end + 1 :]
            yield line

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
