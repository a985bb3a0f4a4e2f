"""One training step - rows, loss, gradients, update, balance - eager or as one captured CUDA graph."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .data import Rows
from .model import Trainable
from .optimizer import Optimizer

WARM_UP = 3  # eager steps before a capture: kernels are compiled and tuned in them


class Step:
    """Runs steps over the rows at `rows.positions`; the last loss is in `loss`, on the device.

    `rate` and `balance_rate` are device scalars inside, so a captured step follows both schedules.
    """

    def __init__(self, model: Trainable, optimizer: Optimizer, rows: Rows, *, compiled: bool = False) -> None:
        self.model, self.optimizer, self.rows = model, optimizer, rows
        self.loss = torch.zeros((), device=model.device)
        self.balance_rate = torch.zeros((), device=model.device)
        self._cross_entropy: Callable[..., torch.Tensor] = (
            torch.compile(_cross_entropy, dynamic=False) if compiled else _cross_entropy
        )
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, rate: float, balance_rate: float) -> None:
        """One step at these rates."""
        self.optimizer.rate.fill_(rate)
        self.balance_rate.fill_(balance_rate)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()

    def capture(self) -> None:
        """From now on replay one recorded step; at least WARM_UP steps must have run. The recording is no step."""
        self.optimizer.clear()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        self._graph = graph

    def evaluate(self) -> torch.Tensor:
        """Mean loss of the rows at hand, nats a byte; nothing is updated."""
        load = self.model.load.clone()
        # with gradients on the compiled kernels are those of training
        loss = self._loss().detach()
        self.model.load.copy_(load)
        return loss

    def _loss(self) -> torch.Tensor:
        tokens, targets = self.rows.take()
        return self._cross_entropy(self.model(tokens), targets.flatten())

    def _run(self) -> None:
        self.optimizer.clear()
        loss = self._loss()
        loss.backward()
        self.loss.copy_(loss.detach())
        self.optimizer.step()
        self.model.balance(self.balance_rate)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets)


def side_stream(run: Callable[[], None]) -> None:
    """Run on a stream of its own, as everything before a capture has to; plainly where there is no GPU."""
    if not torch.cuda.is_available():
        run()
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
