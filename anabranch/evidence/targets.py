"""What a proof is asked of: one or two URLs of running servers, or the arms of a spec file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.evidence.client import ClientSpec
from anabranch.evidence.spec import ArmSpec, ExactSpec, Spec, parse_spec


@dataclass(frozen=True)
class Targets:
    """Arms in order, A first; `text` identifies what was asked for, `spec` is the file's if there is one."""

    arms: tuple[ArmSpec, ...]
    client: Mapping[str, Any]
    text: str
    spec: Spec | None = None
    size: int | None = None

    @property
    def exact(self) -> ExactSpec:
        """The spec's fixed inputs, or the default ones."""
        return (self.spec.exact if self.spec else None) or ExactSpec()

    @property
    def vocab_size(self) -> int | None:
        """Size of the vocabulary, if it was given."""
        return self.size or (self.spec.workload.vocab_size if self.spec else None)

    def client_of(self, url: str, **changes: Any) -> ClientSpec:
        """How to speak to the server of an arm."""
        return ClientSpec(base_url=url, **{**self.client, **changes})


def parse_targets(words: Sequence[str], client: Mapping[str, Any] | None = None) -> Targets:
    """From one spec file, or one or two URLs; `client` are options that the file does not give.

    Raises:
        ValueError: something else, or a file that cannot be read.
    """
    given = dict(client or {})
    if len(words) == 1 and words[0].endswith(".toml"):
        path = Path(words[0])
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
        spec = parse_spec(text, str(path), path.parent)
        return Targets(spec.arms, {**given, **spec.client}, text, spec)
    if not 1 <= len(words) <= 2 or not all(word.startswith(("http://", "https://")) for word in words):
        raise ValueError(f"targets {' '.join(words)!r}: need one or two URLs, or one spec file (.toml)")
    arms = tuple(ArmSpec(name=name, url=url) for name, url in zip("ab", words, strict=False))
    return Targets(arms, given, "".join(f'[arms.{arm.name}]\nurl = "{arm.url}"\n' for arm in arms))
