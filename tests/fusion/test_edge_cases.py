"""Edge cases that public engines met in these fusions, as checks of ours, numbered as in the list they come from."""

from dataclasses import fields, replace

import pytest
import torch
from helpers.checkpoints import config_of, filled, weights_of
from helpers.configs import kimi_k3
from helpers.oracle import Session, model_config
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny

from anabranch import LLM
from anabranch.config.fusion import KDA_PATHS, MLA_PATHS, FusionConfig
from anabranch.config.hf import parse_model_config
from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.engine import build as llm_module
from anabranch.engine.footprint import meta_model
from anabranch.engine.verify import verify_graphs
from anabranch.fusion import counters
from anabranch.fusion.costs import Cell, Costs, Times
from anabranch.fusion.describe import describe
from anabranch.fusion.fork import Fork
from anabranch.fusion.kda_paths import kda_paths
from anabranch.fusion.mla_paths import mla_paths
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.tiny import init_checkpoint
from anabranch.ops.registry import IMPLEMENTATIONS
from anabranch.parallel.layout import Layout

TINY = {"k3": config_of("k3", quantization_config=None), "kl": config_of("kl")}


def model_of(config: ModelConfig, **kw) -> KimiForCausalLM:
    return filled_with(KimiForCausalLM(config, **kw), config)


def filled_with(model: KimiForCausalLM, config: ModelConfig) -> KimiForCausalLM:
    weights = weights_of(config, 0, torch.bfloat16)
    for name, view in model.state_dict().items():
        view.copy_(weights[name].flatten()[: config.kda.heads] if name.endswith("A_log") else weights[name])
    return model


def outputs(result) -> dict[str, torch.Tensor]:
    values = {f.name: getattr(result, f.name) for f in fields(result)}
    return {n: v.take() if isinstance(v, Fork) else v for n, v in values.items() if v is not None}


def paths_of(model: KimiForCausalLM, layer: int):
    """(prologue, allowed paths by name) of a layer."""
    kind = model.config.layer_kinds[layer]
    known = kda_paths(model.config.kda.full_rank_gate) if kind == "kda" else mla_paths(model.config.mla.output_gate)
    verdicts = getattr(model.plan, kind).verdicts
    return model.model.layers[str(layer)].self_attn.prologue, {n: p for n, p in known.items() if verdicts[n].ok}


def test_dp_attention_splits_by_the_attention_group():
    """Check 3: attention-TP 1 of 16 ranks splits its QKVG 36864 | 12288, and equals the separate GEMMs at M = 1, 32."""
    config = parse_model_config(kimi_k3())
    layout = Layout(tp=16, dp_attention=16, ep=16)
    on_meta = meta_model(config, layout, 5, torch.bfloat16, FusionConfig(kda="split"))
    report = describe(on_meta.model.layers["0"].self_attn.prologue, on_meta.plan.kda, config)
    split = next(p for p in report.paths if p.path == "split").gemms[0]
    assert [(p.to, p.columns) for p in split.parts] == [("qkv", 36864), ("gate", 12288)]
    place = ParallelConfig(tp_size=16, tp_rank=5, attn_tp_size=1, ep_size=16, ep_rank=5)
    small = model_config(kimi_k3_tiny(experts=16))
    model = KimiForCausalLM(small, parallel=place, deterministic=True)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) / 8)
    prologue, paths = paths_of(model, 0)
    for rows in (1, 32):
        x = torch.randn(rows, small.hidden_size)
        want = outputs(paths["single"].run(prologue.weights, x))
        for name, path in paths.items():
            got = outputs(path.run(prologue.weights, x))
            assert all(torch.equal(got[k], want[k]) for k in want), (name, rows)


def test_bit_comparisons_refuse_to_run_in_normal_mode(tmp_path):
    """Check 4: where two identical runs may differ, equality of tokens proves nothing and is not asked for."""
    init_checkpoint("kl", tmp_path)
    normal = LLM(tmp_path, max_seqs=1, max_len=64)
    normal.engine.runner.graphs = object()
    with pytest.raises(ValueError, match="graphs can only be verified in deterministic mode"):
        next(verify_graphs(normal, 2))


@pytest.mark.parametrize("case", TINY)
def test_the_decay_is_up_projected_once_on_every_path(case):
    """Check 5: whatever computes f_b, the decay has full width, M = 1 included, never that of the rank."""
    config = TINY[case]
    model = model_of(config)
    prologue, paths = paths_of(model, 0)
    assert len(paths) >= 4
    for name, path in paths.items():
        for rows in (1, 7):
            got = outputs(path.run(prologue.weights, torch.randn(rows, config.hidden_size)))
            assert got["forget"].shape == (rows, config.kda.width), name
            assert got["beta"].shape == (rows, config.kda.heads), name


@pytest.mark.parametrize("heads", [3, 6, 12, 24, 48, 96])
def test_no_head_count_falls_back_silently(heads):
    """Check 8: the paths that run, and the kernels that would be chosen on a GPU, are those of any other head count."""
    small = replace(TINY["k3"], kda=replace(TINY["k3"].kda, heads=heads))
    model = KimiForCausalLM(replace(small, layer_kinds=("kda",), moe_layers=(False,), moe=None, attn_res_block=None))
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) / 8)
    session = Session(model)
    with counters.counting() as ran:
        session.step((0, [1, 2, 3]))
        session.step((0, [4]), decodes=1)
    assert (ran["kda.whole"], ran["kda.gemm"]) == (2, 4)
    config = replace(parse_model_config(kimi_k3()), kda=replace(parse_model_config(kimi_k3()).kda, heads=heads))
    for name in ("conv", "kda_decode", "kda_prefill", "kda_step"):
        for implementation in IMPLEMENTATIONS[name]:
            assert implementation.fits is None or implementation.fits(config).ok, (name, implementation.name)


EDGES = (14, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512)


@pytest.mark.parametrize("case", TINY)
@pytest.mark.parametrize("layer", [0, 3])
def test_paths_agree_around_every_row_count_at_which_engines_switch(case, layer):
    """Check 9: in deterministic mode all paths have the same bits, so a switch between two of them is never visible."""
    config = TINY[case]
    model = model_of(config, deterministic=True)
    prologue, paths = paths_of(model, layer)
    x = torch.randn(max(EDGES), config.hidden_size)
    whole = outputs(paths["single"].run(prologue.weights, x))
    for rows in EDGES:
        for name, path in paths.items():
            got = outputs(path.run(prologue.weights, x[:rows]))
            assert all(torch.equal(got[k], whole[k][:rows]) for k in whole), (name, rows)


@pytest.mark.parametrize("case", TINY)
def test_one_row_slices_are_read_by_their_stride(case):
    """Check 10: with one token a slice of a wide GEMM calls itself contiguous; the layer's result must not notice."""
    config = TINY[case]
    model = model_of(config, deterministic=True, fusion=FusionConfig(kda="whole"))
    prologue, _ = paths_of(model, 0)
    one = prologue(torch.randn(1, config.hidden_size))
    assert one.beta.is_contiguous()
    assert one.beta.untyped_storage().nbytes() > one.beta.nbytes
    assert one.rows(0, 1).beta.stride(-1) == 1
    alone = torch.cat([Session(model).step((0, [t]))[0] for t in (5, 9)])
    both = torch.cat(Session(model).step((0, [5]), (1, [9])))
    assert torch.equal(alone, both)
    decoding = Session(model)
    first = decoding.step((0, [5]), decodes=1)[0]
    assert torch.equal(first, alone[:1])


@pytest.mark.parametrize("case", [*TINY, "k3-fp8"])
def test_nothing_is_left_uninitialised(case):
    """Check 35: in poisoned memory every parameter, dt_bias and the rows of pads and gaps included, holds a number."""
    if case == "k3-fp8":
        from helpers.checkpoints import raw_fp8

        config = parse_model_config(raw_fp8("k3", hidden_size=192))
        model = KimiForCausalLM(config)
        for name, view in model.state_dict().items():
            full = weights_of(config, 0, torch.bfloat16)
            if name in full and full[name].dtype == view.dtype:
                view.copy_(full[name].flatten()[: config.kda.heads] if name.endswith("A_log") else full[name])
            else:
                view.fill_(0)
    else:
        model = filled(TINY[case], weights_of(TINY[case], 0, torch.bfloat16))
    for name, parameter in model.named_parameters():
        assert parameter.float().isfinite().all(), name
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_the_cache_takes_what_model_and_workspaces_leave(tmp_path, monkeypatch):
    """Check 39: weights, merged buffers and everything that warms up come before the cache is sized, graphs after."""
    init_checkpoint("kl", tmp_path)
    order: list[str] = []

    def watch(name: str, result=None):
        real = getattr(llm_module, name)

        def call(*args, **kw):
            order.append(name)
            return real(*args, **kw) if result is None else result

        monkeypatch.setattr(llm_module, name, call)

    class Graphs:
        def __init__(self, *args) -> None:
            order.append("DecodeGraphs")

        def capture(self) -> None:
            order.append("capture")

    for name in ("load_model", "plan_memory", "make_cache"):
        watch(name)
    watch("warm_up", 12345)
    monkeypatch.setattr(llm_module, "DecodeGraphs", Graphs)
    monkeypatch.setattr(llm_module, "on_cuda", lambda model: True)
    reserves = []
    plan = llm_module.plan_memory
    monkeypatch.setattr(
        llm_module, "plan_memory", lambda *a, reserve, **k: reserves.append(reserve) or plan(*a, reserve=reserve, **k)
    )
    LLM(tmp_path, max_seqs=1, max_len=64)
    assert order == ["load_model", "warm_up", "plan_memory", "make_cache", "DecodeGraphs", "capture"]
    assert reserves == [12345]


def test_an_isolated_win_without_effect_changes_nothing():
    """Check 44: a path that wins less than two runs of the same path differ is reported as measured and not taken."""
    cell = Cell(kind="kda", shape="s", graph=True, deterministic=False, rows=8, context=512)
    times = Times(us={"whole": 100.0, "overlap": 99.6, "split": 112.0}, spread_us=0.5)
    costs = Costs({cell: times}, "whole", ("whole", "overlap", "split"))
    assert costs.pick(8, 512, 512, True) == "whole"
    [decision] = list(costs.decisions())
    assert (decision.path, decision.us["overlap"], decision.spread_us) == ("whole", 99.6, 0.5)


def test_every_path_is_listed_once_and_known_everywhere():
    """Names in options, rules and prologues are the same set: none is reachable under a silent alias."""
    for config in (TINY["k3"], model_config(kimi_linear_tiny())):
        known = set(kda_paths(config.kda.full_rank_gate))
        assert known <= set(KDA_PATHS)
        assert set(mla_paths(config.mla.output_gate)) <= set(MLA_PATHS)
