"""A reader of event streams that follows the standard, and one that cuts lines as Python does."""

import json
import re


def events(raw: bytes) -> list[str]:
    """Data of every event, as the standard reads it."""
    found, data = [], []
    for line in re.split(r"\r\n|\r|\n", raw.decode()):
        if not line:
            if data:
                found.append("\n".join(data))
            data = []
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
    assert not data, "the last event is not ended"
    return found


def events_by_splitlines(raw: bytes) -> list[str]:
    """As clients read that rely on str.splitlines."""
    return [line.removeprefix("data: ") for line in raw.decode().splitlines() if line.startswith("data: ")]


def chunks(raw: bytes) -> list[dict]:
    """All chunks of a complete stream."""
    *found, last = events(raw)
    assert last == "[DONE]"
    return [json.loads(event) for event in found]
