"""What one process of a small gloo job does, and asserts; importable by the processes of a test."""

import torch
from torch._C._distributed_c10d import TCPStore

from anabranch.parallel.groups import join, leave
from anabranch.parallel.layout import Layout

CPU = torch.device("cpu")


def rows(replica: int, count: int, width: int = 5) -> torch.Tensor:
    return torch.arange(count * width, dtype=torch.float32).view(count, width) + 100 * (replica + 1)


def exchange(rank: int, port: int, deterministic: bool) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    comm = join(Layout(tp=4, dp_attention=2), rank, store, CPU, deterministic=deterministic, timeout_s=30)
    for counts in ((3, 3), (4, 1), (1, 7)):
        mine = rows(comm.place.dp_rank, counts[comm.place.dp_rank])
        everyone = torch.cat([rows(i, count) for i, count in enumerate(counts)])
        assert torch.equal(comm.gather_rows(mine, counts), everyone), counts
        # rank r holds (r + 1) times the rows as its part of the sum
        assert torch.equal(comm.sum_rows(everyone * (rank + 1), counts), mine * 10), counts
    assert torch.equal(comm.all_reduce(torch.full((2, 3), rank + 1.0), "tp"), torch.full((2, 3), 10.0))
    first = rank // 2 * 2
    assert comm.all_gather(torch.full((2, 1), float(rank)), "attn_tp").tolist() == [[first, first + 1]] * 2
    leave()


def hand_over(rank: int, port: int, deterministic: bool) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    comm = join(Layout(tp=2, pp=2), rank, store, CPU, deterministic=deterministic, timeout_s=30)
    for step in range(20):  # more than may be under way
        if rank < 2:
            comm.send(torch.full((2, step + 1, 3), float(rank)))
        else:
            got = comm.receive(torch.full((2, step + 1, 3), torch.nan))
            assert (got == rank - 2).all()
    assert comm.gather_rows(torch.ones(2, 2), None).shape == (2, 2)
    assert comm.sum_rows(torch.ones(1, 2), None).tolist() == [[2.0, 2.0]]
    leave()
