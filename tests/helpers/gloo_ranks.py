"""What one process of a small gloo job does, and asserts; importable by the processes of a test."""

import multiprocessing
from collections.abc import Callable
from dataclasses import replace

import torch
from helpers.configs import small_k3, small_linear
from torch._C._distributed_c10d import TCPStore

from anabranch.config.hf import parse_model_config
from anabranch.fusion import counters
from anabranch.layers.batch import Batch
from anabranch.layers.moe import MoeFfn
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.weights import copy_shard
from anabranch.ops.segments import Segments
from anabranch.parallel.groups import join, leave
from anabranch.parallel.layout import Layout

CPU = torch.device("cpu")
# config, rows of the replicas (an idle one has a row of nobody), and the experts that rows are drawn to
MOE_CASES = {
    "uneven": (small_linear(), (7, 3, 1, 30), ()),
    "idle": (small_linear(num_shared_experts=0), (0, 9, 0, 2), ()),
    "one rank's experts": (small_linear(), (4, 2, 5, 1), (2, 3)),
    "latent": (small_k3(), (3, 11, 0, 1), ()),
}


def run_job(world: int, work: Callable[[int, int, int], None]) -> None:
    """work(rank, world, port of the store) in a process for each rank; all must succeed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=work, args=(rank, world, store.port)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0] * world


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


def moe_layer(rank: int, world: int, port: int) -> None:
    """A layer with its experts over `world` ranks gives every row what the whole layer gives it, gathered or sent."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    layout = Layout(tp=world, dp_attention=world, ep=world)
    comm = join(layout, rank, store, CPU, deterministic=False, timeout_s=60)
    for name, (raw, counts, drawn) in MOE_CASES.items():
        whole, part = _layers(raw, layout, comm, drawn)
        assert part.traffic is not None
        counts = counts[:world]
        torch.manual_seed(5)
        everyone = [torch.randn(max(1, count), 64) for count in counts]
        batch = _rows_of(counts[rank], tuple(len(x) for x in everyone))
        want = whole(everyone[rank], _rows_of(len(everyone[rank]), None))
        for summed, taken in ((0, 0), (1 << 40, 1)):  # whatever the rule says of so few rows
            part.traffic = replace(part.traffic, summed=summed, gathered=0)
            with counters.counting() as ran:
                got = part(everyone[rank].clone(), batch)
            assert ran["moe.all_to_all"] == taken, name
            # not assert_close, which imports more than the rest of the test
            assert got.isfinite().all(), name
            assert ((got - want).abs() <= 2e-5 + 2e-5 * want.abs()).all(), name
        assert whole.load is not None
        assert part.load is not None
        for x in (x for x, count in zip(everyone, counts, strict=True) if count):
            if x is not everyone[rank]:
                whole(x, _rows_of(len(x), None))
        if not counts[rank]:  # a row of nobody was counted by the layer that does not know
            whole.load.counts -= torch.bincount(whole.gate(everyone[rank])[1][0], minlength=9)
        total = comm.all_reduce(part.load.counts.clone(), "tp")
        assert torch.equal(total[:-1], 2 * whole.load.counts[:-1]), name
        if drawn:
            assert total[:-1].nonzero().flatten().tolist() == list(drawn)
    leave()


def _layers(raw: dict, layout: Layout, comm, drawn: tuple[int, ...]) -> tuple[MoeFfn, MoeFfn]:
    """One layer on one rank with random weights, and this rank's part of it."""
    config = parse_model_config(raw)
    full = KimiForCausalLM(config, dtype=torch.float32, count_experts=True)
    torch.manual_seed(1)
    for weight_name, p in full.named_parameters():
        if p.dtype == torch.uint8:
            p.copy_(torch.randint(118, 124, p.shape) if "scale" in weight_name else torch.randint(0, 256, p.shape))
        else:
            p.copy_(torch.randn(p.shape) * 0.2)
    whole = full.model.layers["1"].block_sparse_moe
    whole.gate.e_score_correction_bias[list(drawn)] += 100
    place = layout.rank(comm.place.tp_rank)
    model = KimiForCausalLM(config, parallel=place, comm=comm, dtype=torch.float32, count_experts=True)
    weights = full.state_dict()
    for weight_name, view in model.state_dict().items():
        copy_shard(view, weights[weight_name], weight_name, config, place)
    return whole, model.model.layers["1"].block_sparse_moe


def _rows_of(count: int, counts: tuple[int, ...] | None) -> Batch:
    """A prompt of `count` tokens, or the row of an idle replica."""
    shown = max(1, count)
    return Batch(
        tokens=torch.zeros(shown, dtype=torch.int64),
        segments=Segments.of([shown]),
        prefill=Segments.of([shown]),
        decodes=0,
        slots=torch.zeros(1, dtype=torch.int64),
        block_table=torch.zeros(1, 1, dtype=torch.int64),
        rows=torch.arange(shown) if count else torch.tensor([-1]),
        wanted=torch.arange(shown),
        counts=counts,
    )
