"""GSM8K: questions, the prompt to the byte, and the rule that finds the number in an answer."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from pathlib import Path

# grade_school_math/data/test.jsonl of github.com/openai/grade-school-math at commit 3101c7d (MIT), 1,319 questions
TEST_SHA256 = "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
STOP = ("Question:",)
RULE = (
    "text before 'Question:'; the number after the first '####' if there is one, else the last number; without commas, "
    "'$' and a closing full stop; equal as decimal numbers"
)
_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED, _ANY = re.compile(rf"####\s*({_NUMBER})"), re.compile(_NUMBER)


@dataclass(frozen=True)
class Question:
    """One question with its worked answer, and the number that the answer ends in."""

    question: str
    answer: str
    number: Decimal


@dataclass(frozen=True)
class Test:
    """Questions, worked examples in front of them, and where both come from."""

    questions: tuple[Question, ...]
    shots: tuple[Question, ...]
    source: str
    sha256: str

    def prompt(self, question: Question) -> str:
        """The text that is completed."""
        worked = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in self.shots)
        return f"{worked}Question: {question.question}\nAnswer:"

    @property
    def prompts_sha256(self) -> str:
        """Of all prompts in their order, a zero byte between them."""
        return hashlib.sha256("\0".join(map(self.prompt, self.questions)).encode()).hexdigest()


def load_test(
    data: Path | None = None,
    sha256: str | None = None,
    shots: Path | None = None,
    count: int = 5,
    limit: int | None = None,
) -> Test:
    """The test set at `data`, which must have the hash `sha256` (default: that of GSM8K's own test set).

    Without `data`, sixteen questions of our own that show the plumbing and measure no model. Worked examples are the
    first `count` of `shots` (GSM8K's train.jsonl), or five of our own: neither is ever among the questions.

    Raises:
        ValueError: a file cannot be read, has another hash, or too few lines.
    """
    raw = _packaged("fixture.jsonl") if data is None else _read(data)
    found = hashlib.sha256(raw).hexdigest()
    wanted = sha256 or (found if data is None else TEST_SHA256)
    if found != wanted:
        raise ValueError(f"{data}: SHA-256 is {found}, need {wanted}; name another file's with --sha256")
    worked = parse(_packaged("shots.jsonl") if shots is None else _read(shots), str(shots))
    if not 0 <= count <= len(worked):
        raise ValueError(f"{count} worked examples: the file has {len(worked)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: need at least 1")
    source = "own fixture" if data is None else "GSM8K test set" if wanted == TEST_SHA256 else str(data)
    return Test(parse(raw, str(data))[:limit], worked[:count], source, found)


def parse(raw: bytes, where: str) -> tuple[Question, ...]:
    """From JSON lines with `question` and `answer`, whose last line is "#### NUMBER".

    Raises:
        ValueError: a line has another form, or there is none.
    """
    questions = [_question(line, f"{where} line {i}") for i, line in enumerate(raw.decode("utf-8").splitlines(), 1)]
    if not questions:
        raise ValueError(f"{where}: holds no questions")
    return tuple(questions)


def _question(line: str, where: str) -> Question:
    try:
        item = json.loads(line)
        question, answer = str(item["question"]), str(item["answer"])
    except (ValueError, KeyError, TypeError):
        question = answer = ""
    number = extract(answer) if "####" in answer else None
    if number is None:
        raise ValueError(f'{where}: need {{"question": ..., "answer": "... #### NUMBER"}}')
    return Question(question, answer, number)


def extract(text: str) -> Decimal | None:
    """The number of an answer, by `RULE`."""
    text = text.partition(STOP[0])[0]
    marked = _MARKED.search(text)
    found: Sequence[str] = [marked[1]] if marked else _ANY.findall(text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def _packaged(name: str) -> bytes:
    return resources.files("anabranch.evidence").joinpath("data", name).read_bytes()
