"""The fork on a GPU: it overlaps, eager and in graphs, on few streams, and no memory is given away early."""

import json
from itertools import pairwise

import pytest
import torch
from helpers.oracle import model_config
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny

from anabranch.config.model import ModelConfig
from anabranch.fusion import counters
from anabranch.fusion.fork import Branch, CudaStreams
from anabranch.fusion.kda_paths import KDA_FULL_RANK
from anabranch.fusion.prologue import EQUALITY
from anabranch.measure.gate import check_mla, check_prologue, take_all
from anabranch.measure.paths import bench_mla_gate, bench_prologue
from anabranch.measure.subject import Decodes, Subject, force
from anabranch.measure.tune import tune
from anabranch.parallel.layout import Layout

CUDA = torch.device("cuda")
ROWS = (1, 2, 7, 16, 17, 64, 65, 128)
MODELS = {
    "full-rank": model_config(kimi_k3_tiny(hidden=256, kda_heads=6, heads=6, kda_dim=32, kv_lora=32, nope=16, rope=16)),
    "low-rank": model_config(
        kimi_linear_tiny(hidden=256, kda_heads=6, heads=6, kda_dim=32, kv_lora=32, nope=16, rope=16)
    ),
}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def subject(config: ModelConfig, layout: Layout | None = None, **options) -> Subject:
    return Subject.of(config, layout or Layout(), CUDA, torch.bfloat16, **options)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", MODELS)
def test_overlapped_projections_equal_separate_ones(case, deterministic):
    s = subject(MODELS[case], deterministic=deterministic)
    layer, paths = s.layer("kda"), s.paths("kda")
    for rows in ROWS:
        check_prologue(s, layer, paths, rows)  # eager, and three replays with new inputs over poisoned outputs
        if deterministic:
            x = s.hidden(rows)
            a, b = (take_all(paths[n].run(layer.prologue.weights, x)) for n in ("overlap", "separate"))
            assert all(torch.equal(a[name], b[name]) for name in b), rows


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_overlapped_gate_equals_a_separate_one(deterministic):
    s = subject(MODELS["full-rank"], deterministic=deterministic)
    layer, paths = s.layer("mla"), s.paths("mla")
    decodes = Decodes(s, 64, 64 * 300)
    for rows in (1, 7, 16, 64):
        for context in (1, 64, 300):
            batch = decodes.batch(rows, context, False)
            check_mla(s, layer, paths, decodes, batch)
            if deterministic:
                x, got = s.hidden(rows), []
                for name in ("overlap", "separate"):
                    force([layer.prologue], paths[name])
                    got.append(layer(x, batch, decodes.cache.layers[-1]))
                assert torch.equal(*got), (rows, context)


def kernels(graph: torch.cuda.CUDAGraph, tmp_path) -> list[tuple[float, float, int]]:
    """(start, end, stream) of every kernel of one replay."""
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    file = tmp_path / "trace.json"
    profile.export_chrome_trace(str(file))
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    return sorted((e["ts"], e["ts"] + e["dur"], e["args"]["stream"]) for e in events)


def test_a_stack_of_69_layers_replays_on_few_streams(real_k3, tmp_path):
    """Check 6 of the edge cases: at most four replay streams however many layers fork; and they do run beside."""
    s = subject(real_k3, Layout(tp=8))
    layer, path = s.layer("kda"), KDA_FULL_RANK["overlap"]
    x = s.hidden(1)

    def stack(layers: int) -> torch.cuda.CUDAGraph:
        def run():
            for _ in range(layers):
                take_all(path.run(layer.prologue.weights, x))

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with counters.counting() as ran, torch.cuda.graph(graph):
            run()
        assert ran["fork.side"] == layers
        assert ran["fork.late"] == 0
        return graph

    counts = {}
    for layers in (3, 69):
        spans = kernels(stack(layers), tmp_path)
        counts[layers] = len({stream for _, _, stream in spans})
        beside = sum(start < before for (_, before, _), (start, _, _) in pairwise(spans))
        print(f"{layers} layers: {len(spans)} kernels, {counts[layers]} replay streams, {beside} start beside another")
        assert len(spans) >= 3 * layers
        assert beside >= layers // 2
    assert max(counts.values()) <= 4


def test_a_skipped_gate_does_not_break_a_capture():
    """Check 7: a step that applies no gate must end its capture joined, and the next must not meet a stale gate."""
    s = subject(MODELS["full-rank"])
    layer, path = s.layer("mla"), s.paths("mla")["overlap"]
    weights, x = layer.prologue.weights, s.hidden(4)
    take_all(path.run(weights, x))
    torch.cuda.synchronize()
    skipped = torch.cuda.CUDAGraph()
    with torch.cuda.graph(skipped):
        inputs = path.run(weights, x)
        inputs.close()
    skipped.replay()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = take_all(path.run(weights, x))
    for _ in range(3):
        fresh = s.hidden(4)
        x.copy_(fresh)
        outputs["gate"].fill_(float("nan"))
        graph.replay()
        want = take_all(s.paths("mla")["separate"].run(weights, fresh))
        EQUALITY.check(outputs["gate"].contiguous(), want["gate"], "gate")


def test_a_side_that_raises_leaves_the_device_usable():
    branch, x = Branch(), torch.randn(64, 64, device=CUDA)

    def side():
        x @ x
        raise ValueError("side")

    x @ x
    torch.cuda.synchronize()
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ValueError, match="side"), torch.cuda.graph(graph):
            branch.beside("f", x, main=lambda: x @ x, side=side)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a, b = branch.beside("f", x, main=lambda: x * 2, side=lambda: x * 4)
    graph.replay()
    assert torch.equal(a * 2, b)


def test_eager_memory_is_not_reused_early():
    """Slow consumers on the main stream, outputs freed at once, the side stream allocating the same sizes again."""
    branch, size = Branch(), 1 << 20
    sums, want = [], []
    for i in range(200):
        x = torch.full((size,), float(i), device=CUDA)
        pending = branch.fork("f", x, lambda x=x: x * 2)
        other = branch.fork("g", x, lambda x=x: x * 3)
        torch.cuda._sleep(20_000)
        a = other.take()
        torch.cuda._sleep(200_000)  # the consumer below starts late
        sums.append(a.sum())
        del a, other  # freed while its consumer has not run; the next side work is marked before it
        b = pending.take()
        sums.append(b.sum())
        del b, pending, x
        want += [3.0 * i * size, 2.0 * i * size]
    got = torch.stack(sums).double().cpu()
    assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), rtol=1e-5)


def test_captured_memory_is_not_reused_early():
    """The same inside one graph, where nothing but the order of the branches protects the memory."""
    branch, size, sums, want = Branch(), 1 << 20, [], []
    x = torch.ones(size, device=CUDA)

    def run():
        sums.clear()
        for i in range(20):
            a = branch.beside("a", x, main=lambda: None, side=lambda i=i: x * (3 * i))[1]
            pending = branch.fork("f", x, lambda i=i: x * (2 * i))
            torch.cuda._sleep(100_000)
            sums.append(a.sum())
            del a
            sums.append(pending.take().sum())

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with counters.counting() as ran, torch.cuda.graph(graph):
        run()
    assert ran["fork.late"] == 20
    for i in range(20):
        want += [3.0 * i * size, 2.0 * i * size]
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        got = torch.stack(sums).double().cpu()
        assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), rtol=1e-5)


def test_the_side_is_never_the_stream_that_is_recorded_on():
    streams = CudaStreams(CUDA)
    for _ in range(70):  # more than twice the ring that torch hands streams out from
        main = torch.cuda.Stream()
        assert streams.side(main).cuda_stream != main.cuda_stream


def test_benches_and_tuning_run_on_graphs(tmp_path):
    s = subject(MODELS["full-rank"])
    for kind in ("kda", "mla"):
        [result] = bench_prologue(s, kind, [3], graph=True)
        assert min(result.timed.median(arm) for arm in result.timed.us) > 0.5
    [result] = bench_mla_gate(s, [2], [130], graph=True)
    assert set(result.timed.us) == {"separate", "merged", "overlap"}
    done = list(tune(s, tmp_path / "t.json", graphs=[True, False], rows=(1, 4), contexts=(8, 70)))
    assert [p.number for p in done] == list(range(1, 13))
