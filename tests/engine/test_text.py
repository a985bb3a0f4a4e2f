"""Streamed text: pieces add up to the whole, stop strings never show, however the text is cut into tokens."""

from hypothesis import given
from hypothesis import strategies as st

from anabranch.engine.text import TextStream


class Pieces:
    """A decoder whose token i is the i-th piece; the last piece is held back until the flush."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self.pieces, self.tail = pieces, tail

    def push(self, token: int) -> str:
        return self.pieces[token]

    def flush(self) -> str:
        return self.tail


def run(pieces: list[str], stops: tuple[str, ...], tail: str = "") -> tuple[TextStream, str]:
    stream = TextStream(Pieces(pieces, tail), stops)
    shown = ""
    for i in range(len(pieces)):
        stream.push(i)
        shown += stream.take()
        if stream.stopped:
            break
    stream.finish()
    return stream, shown + stream.take()


alphabet = st.text(alphabet="abc", max_size=4)


@given(
    pieces=st.lists(alphabet, max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    tail=alphabet,
)
def test_stop_strings_end_the_text_exactly(pieces, stops, tail):
    stream, shown = run(pieces, tuple(stops), tail)
    text, want, stopped = "", None, False
    for piece in [*pieces, tail]:
        text += piece
        found = [text.find(s) for s in stops if s in text]
        if found:
            want, stopped = text[: min(found)], True
            break
    assert stream.text == shown == (want if stopped else text)
    assert stream.stopped == stopped


@given(pieces=st.lists(alphabet, max_size=12), stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_what_was_shown_is_never_taken_back(pieces, stops):
    stream = TextStream(Pieces(pieces), tuple(stops))
    shown = ""
    for i in range(len(pieces)):
        stream.push(i)
        shown += stream.take()
        assert stream.text.startswith(shown)
        if stream.stopped:
            break


def test_a_possible_stop_is_held_back_and_released():
    stream = TextStream(Pieces(["a</", "s", "x"]), ("</s>",))
    stream.push(0)
    assert stream.take() == "a"
    stream.push(1)
    assert stream.take() == ""
    stream.push(2)
    assert stream.take() == "</sx"
