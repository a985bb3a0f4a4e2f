"""Several ranks in one process: shards of one full model, and threads that meet at every collective."""

import threading
from collections.abc import Callable

import torch

from anabranch.config.fusion import FusionConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.weights import copy_shard
from anabranch.parallel.layout import Layout


class ThreadRank:
    """Collectives of one rank. Ranks of a group leave their tensor on a board, meet, and read the others'."""

    def __init__(self, place: ParallelConfig, board: dict, barrier: threading.Barrier) -> None:
        self.place, self.board, self.barrier = place, board, barrier

    def _peers(self, x: torch.Tensor, group: str) -> list[torch.Tensor]:
        self.board[self.place.tp_rank] = x
        self.barrier.wait(timeout=60)
        size = getattr(self.place, f"{group}_size")
        first = self.place.tp_rank - getattr(self.place, f"{group}_rank")
        peers = [self.board[first + i] for i in range(size)]
        self.barrier.wait(timeout=60)
        return peers

    def all_reduce(self, x: torch.Tensor, group: str) -> torch.Tensor:
        return torch.stack(self._peers(x, group)).sum(0)

    def all_gather(self, x: torch.Tensor, group: str) -> torch.Tensor:
        return torch.cat(self._peers(x, group), -1)

    def gather_rows(self, x: torch.Tensor, counts) -> torch.Tensor:
        return x

    def sum_rows(self, x: torch.Tensor, counts) -> torch.Tensor:
        return self.all_reduce(x, "tp")


def rank_models(full: KimiForCausalLM, layout: Layout, fusion: FusionConfig | None = None) -> list[KimiForCausalLM]:
    """One model for each rank of `layout`, its weights the shards of `full`'s."""
    board, barrier = {}, threading.Barrier(layout.tp)
    weights, models = full.state_dict(), []
    for rank in range(layout.tp):
        place = layout.rank(rank)
        comm = ThreadRank(place, board, barrier)
        model = KimiForCausalLM(full.config, parallel=place, fusion=fusion, comm=comm, dtype=full.dtype)
        if full.dtype == torch.float64:
            model.double()
        for name, view in model.state_dict().items():
            copy_shard(view, weights[name], name, full.config, place)
        models.append(model)
    return models


def run_ranks(count: int, work: Callable[[int], object]) -> list:
    """work(rank) on one thread each; the first failure is raised here."""
    results: list = [None] * count
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
