"""A step between its launch and the moment when the host reads what came of it."""

from dataclasses import dataclass, field

import torch

from anabranch.engine.request import Request, TokenLogprob
from anabranch.engine.sampler import Sampled, Samples


@dataclass(slots=True)
class Result:
    """What a step gave one request: a sample once all its known tokens are computed, and scores of prompt tokens."""

    sampled: Sampled | None = None
    finite: bool = True
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Flight:
    """The segments (request, token count) of one step and the samples it will give.

    `ready`: the segments that are sampled, in the order of the rows of `samples` and of `tokens` (int64 [ready], on the
    device: what the next step continues from). `depths`: tokens of each segment's request that are in the cache once it
    has landed. `asked`: whether slots were finite, as another rank wants to know.
    """

    segments: list[tuple[Request, int]]
    ready: list[int]
    samples: Samples | None
    prompt_logprobs: dict[int, list[TokenLogprob]]
    tokens: torch.Tensor | None = None
    depths: list[int] = field(default_factory=list)
    asked: list[torch.Tensor] = field(default_factory=list)
    landed: torch.cuda.Event | None = None

    def rows(self) -> dict[Request, int]:
        """The row of `tokens` that holds each request's token."""
        return {self.segments[i][0]: row for row, i in enumerate(self.ready)}

    def seal(self, device: torch.device) -> None:
        """All that belongs to the step is launched."""
        if device.type == "cuda":
            self.landed = torch.cuda.Event()
            self.landed.record(torch.cuda.current_stream(device))

    @property
    def wanted(self) -> bool:
        """Whether someone still waits for it."""
        return any(request.finish_reason is None for request, _ in self.segments)

    def land(self) -> None:
        """Block until the step is computed."""
        if self.landed is not None:
            self.landed.synchronize()

    def wait(self) -> list[Result]:
        """Block until the step is computed; one result for each segment, of a step that was sampled here."""
        self.land()
        results = [Result(prompt_logprobs=self.prompt_logprobs.get(i, [])) for i in range(len(self.segments))]
        samples = self.samples.read() if self.samples is not None else []
        for i, sampled in zip(self.ready, samples, strict=True):
            results[i].sampled, results[i].finite = sampled, sampled is not None
        return results
