"""The path `deferred` on an H200: f_b inside the decode step of real layers, in graphs, behind the real projection."""

from typing import cast

import pytest
import torch
from helpers.oracle import model_config
from helpers.ref_tiny import kimi_k3_tiny, random_weights

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("tvm_ffi")

from anabranch.config.fusion import FusionConfig
from anabranch.config.model import ModelConfig
from anabranch.engine.cache import Cache, CacheShape
from anabranch.engine.engine import Engine
from anabranch.engine.graphs import DecodeGraphs
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream
from anabranch.fusion import counters
from anabranch.layers.batch import Batch
from anabranch.layers.kda import KdaLayer
from anabranch.measure.gate import check_kda, check_prologue
from anabranch.measure.subject import Decodes, Subject, force
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops import native
from anabranch.parallel.layout import Layout

FAMILIES = ("kda_step", "skinny_gemm")
if torch.cuda.get_device_capability() != (9, 0) or not all(native.verdict(name).ok for name in FAMILIES):
    pytest.skip("needs a Hopper GPU and built or buildable kernels", allow_module_level=True)

CUDA = torch.device("cuda")
ROWS = (1, 2, 7, 16, 17, 32, 64, 65, 128, 129, 512)
ODD = model_config(kimi_k3_tiny(hidden=256, kda_dim=128, kda_heads=3, heads=3, kv_lora=32, nope=16, rope=16, vdim=16))


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def subject(config: ModelConfig, layout: Layout | None = None, **options) -> Subject:
    return Subject.of(config, layout or Layout(), CUDA, torch.bfloat16, **options)


def test_it_is_allowed_where_the_step_takes_f_b(real_k3, real_kl):
    for layout in (Layout(), Layout(tp=2), Layout(tp=4), Layout(tp=8), Layout(tp=16)):
        assert "deferred" in subject(real_k3, layout).paths("kda")
    assert "deferred" not in subject(real_k3, Layout(tp=8), deterministic=True).paths("kda")
    assert "deferred" not in subject(real_k3, Layout(tp=8), ops={"kda_step": "triton"}).paths("kda")
    assert "deferred" not in subject(real_kl).paths("kda")
    assert subject(real_k3, Layout(tp=8)).default("kda") == "whole"


@pytest.mark.parametrize(("case", "rows"), [("odd", ROWS), (8, ROWS), (1, (1, 17, 64, 129)), (16, (1, 65))])
def test_a_layer_equals_separate_gemms_eager_and_replayed_over_poison(real_k3, case, rows):
    s = subject(ODD) if case == "odd" else subject(real_k3, Layout(tp=case))
    layer, decodes = s.layer("kda"), Decodes(s, max(rows), max(rows) * 8)
    paths = {name: s.paths("kda")[name] for name in ("separate", "deferred")}
    for m in rows:
        check_prologue(s, layer, paths, m)
        check_kda(s, layer, paths, decodes, decodes.batch(m, 8, False))


class Case:
    """A layer at Kimi-K3's width of eight ranks, a batch, and states that a decay changes."""

    def __init__(self, config: ModelConfig, rows: int, path: str) -> None:
        self.subject = subject(config, Layout(tp=8))
        self.layer = cast(KdaLayer, self.subject.layer("kda"))
        self.decodes = Decodes(self.subject, rows, rows * 8)
        self.batch, self.x = self.decodes.batch(rows, 8, False), self.subject.hidden(rows)
        self.take(path)

    def take(self, path: str) -> None:
        force([self.layer.prologue], self.subject.paths("kda")[path])

    def run(self, x: torch.Tensor | None = None, batch: Batch | None = None) -> torch.Tensor:
        cache = self.decodes.cache.layers[0]
        cache.state.fill_(0.01)
        cache.conv.zero_()
        return self.layer((self.x if x is None else x).clone(), batch or self.batch, cache)


def launched(case: Case) -> list[str]:
    """Names of the kernels of one pass."""
    case.run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        case.run()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def test_one_launch_less_than_whole(real_k3):
    case, found = Case(real_k3, 8, "whole"), {}
    for path in ("whole", "deferred"):
        case.take(path)
        with counters.counting() as ran:
            found[path] = launched(case)
        assert ran[f"kda.{path}"] == 2
        assert (ran["kda.gemm"], ran["kda.f_b_in_step"]) == ((4, 0) if path == "whole" else (2, 2))
    assert len(found["whole"]) - len(found["deferred"]) == 1


def test_a_sick_request_without_a_slot_changes_no_bit(real_k3):
    case = Case(real_k3, 7, "deferred")
    want = case.run()
    x = case.x.clone()
    x[3] = float("nan")
    slots = case.batch.slots.clone()
    slots[3] = -1
    fields = {name: getattr(case.batch, name) for name in Batch.__dataclass_fields__}
    got = case.run(x, Batch(**fields | {"slots": slots}))
    others = [i for i in range(7) if i != 3]
    assert torch.equal(got[others], want[others])
    assert not got[3].any()
    assert (case.decodes.cache.layers[0].state[3] == 0.01).all()


def test_pad_rows_are_never_read(real_k3):
    case = Case(real_k3, 8, "deferred")
    want = case.run()
    case.layer.in_proj.rows("pad").fill_(float("nan"))
    assert torch.equal(case.run(), want)


def test_an_update_reaches_a_captured_graph(real_k3):
    case = Case(real_k3, 8, "deferred")
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run()
    before = case.run()
    for factor in (-2.0, 0.5):
        case.layer.second.rows("f_b_proj").mul_(factor)
        out.fill_(float("nan"))
        graph.replay()
        want = case.run()
        assert torch.equal(out, want)
        assert not torch.equal(out, before)


def engine(kda: str, graphs: bool) -> Engine:
    tiny = kimi_k3_tiny(hidden=256, kda_dim=128, kda_heads=3, heads=3, kv_lora=32, nope=16, rope=16, vdim=16)
    model = KimiForCausalLM(ODD, device="cuda", dtype=torch.bfloat16, fusion=FusionConfig(kda=kda))
    weights = random_weights(tiny, 3)
    model.load_state_dict({n: t.flatten()[:3] if n.endswith("A_log") else t for n, t in weights.items()})
    shape = CacheShape.of(model.config, model.parallel, model.dtype)
    cache = Cache(model.config, model.parallel, shape, slots=9, pages=40, snapshots=0, device="cuda")
    runner = Runner(model, cache)
    if graphs:
        runner.graphs = DecodeGraphs(model, cache, cache.device, [1, 2, 4, 8], 512)
        runner.graphs.capture()
    return Engine(runner, (), 512, 64, prefix_cache=False)


def answers(e: Engine) -> list[Request]:
    """Prompts longer than a chunk beside short ones: passes of decodes, of prompts, and of both."""
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
    lengths = (5, 150, 1, 70)
    requests = [
        Request(id=i, prompt=[(7 * j + i) % 96 for j in range(n)], params=params, text=TextStream(None))
        for i, n in enumerate(lengths)
    ]
    for request in requests:
        e.add(request)
    while e.busy:
        e.step()
    return requests


def test_an_engine_with_graphs_answers_as_eager_passes_and_as_whole():
    with counters.counting() as ran:
        eager = answers(engine("deferred", False))
    assert min(ran["kda.deferred"], ran["kda.f_b_in_step"], ran["kda.f_b_late"]) > 0
    with counters.counting() as ran:
        replayed = engine("deferred", True)
        graphs = answers(replayed)
    assert sum(replayed.runner.graph_replays.values()) > 0
    assert ran["kda.f_b_in_step"] > 0
    for ours in (graphs, answers(engine("whole", True))):
        for a, b in zip(ours, eager, strict=True):
            for mine, other in zip(a.sampled[:4], b.sampled[:4], strict=True):
                assert abs(mine.logprob - other.logprob) < 0.1  # of the likeliest token, whichever of a near tie it is
                if mine.token != other.token:
                    break  # what follows answers another text
