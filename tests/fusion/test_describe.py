"""Reports read off a dry run of the real paths."""

from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from helpers.configs import small_k3, small_linear

from anabranch.config import FusionConfig
from anabranch.config.hf import parse_model_config
from anabranch.engine.footprint import meta_model
from anabranch.fusion import counters
from anabranch.fusion.describe import describe
from anabranch.fusion.fork import Fork
from anabranch.fusion.kda_paths import KDA_FULL_RANK, kda_paths
from anabranch.fusion.mla_paths import mla_paths
from anabranch.models.kimi import KimiForCausalLM
from anabranch.parallel.layout import Layout

TP2 = Layout(tp=2)
STEP = {"kda_step": "reference"}  # takes f_b; the default of a CPU does not, and of "meta" nobody knows


def arrived(value):
    return value.take() if isinstance(value, Fork) else value


def prologues(model):
    """(prologue, choice) of the first layer of each kind."""
    kda, mla = (next(i for i, kind in enumerate(model.config.layer_kinds) if kind == k) for k in ("kda", "mla"))
    for index, choice in ((kda, model.plan.kda), (mla, model.plan.mla)):
        yield model.model.layers[str(index)].self_attn.prologue, choice


@pytest.mark.parametrize("make", [small_linear, small_k3])
def test_a_report_is_what_a_real_run_does(make):
    config = parse_model_config(make())
    model = KimiForCausalLM(config, parallel=TP2.rank(0), dtype=torch.float32, ops=STEP)
    for parameter in model.parameters():
        parameter.zero_()
    known = {"kda": kda_paths(config.kda.full_rank_gate), "mla": mla_paths(config.mla.output_gate)}
    for prologue, choice in prologues(model):
        for path in describe(prologue, choice, config).paths:
            if not path.ok:
                assert path.gemms == ()
                continue
            with counters.counting() as counts:
                outputs = known[prologue.kind][path.path].run(prologue.weights, torch.ones(5, config.hidden_size))
                values = {f.name: arrived(getattr(outputs, f.name)) for f in fields(outputs)}
            if values.pop("f_b", None) is not None:
                values["forget"] = outputs.finished(prologue.weights).forget
            assert counts[f"{prologue.kind}.gemm"] == sum(not gemm.inside for gemm in path.gemms)
            widths = Counter()  # `single` copies q, k and v together
            for part in (p for gemm in path.gemms for p in gemm.parts):
                widths[part.to] += part.columns
            for name, value in values.items():
                assert widths[name] == (0 if value is None else value.shape[1])


@pytest.mark.parametrize("make", [small_linear, small_k3])
def test_reports_are_alike_on_any_device_and_read_no_weight(make):
    config = parse_model_config(make())
    real = KimiForCausalLM(config, parallel=TP2.rank(0), dtype=torch.bfloat16, device="cpu", ops=STEP)
    meta = meta_model(config, TP2, 0, torch.bfloat16, FusionConfig())
    for (on_cpu, choice), (on_meta, _) in zip(prologues(real), prologues(meta), strict=True):
        assert describe(on_cpu, choice, config) == describe(on_meta, choice, config)


def test_gemms_depths_and_batches_of_the_low_rank_gate():
    config = parse_model_config(small_linear())
    [(prologue, choice), _] = prologues(meta_model(config, TP2, 0, torch.bfloat16, FusionConfig()))
    report = describe(prologue, choice, config)
    assert [(b.rows, b.pad, b.depth, b.bytes) for b in report.buffers] == [(80, 14, 64, 10240), (32, 0, 8, 512)]
    split = report.paths[1].gemms
    assert [(g.name, g.rows, g.depth, g.batch) for g in split] == [
        ("QKV", 48, 64, 1), ("tail", 32, 64, 1), ("f_b+g_b", 32, 8, 2),
    ]  # fmt: skip
    assert [(p.to, p.columns) for p in split[1].parts] == [("f_b+g_b", 16), ("beta", 2), ("pad", 14)]


def test_side_work_is_told_apart_and_reaches_no_stream():
    config = parse_model_config(small_k3())
    (kda, of_kda), (mla, of_mla) = prologues(meta_model(config, TP2, 0, torch.bfloat16, FusionConfig()))
    for prologue, choice, want in ((kda, of_kda, ["BFA", "f_b"]), (mla, of_mla, ["g"])):
        prologue.weights.branch._streams_of = None  # a real branch would ask it for streams
        paths = {p.path: p.gemms for p in describe(prologue, choice, config).paths}
        assert [g.name for g in paths["overlap"] if g.side] == want
        assert not any(g.side for name, gemms in paths.items() if name != "overlap" for g in gemms)


def test_what_is_left_to_the_decode_step_is_no_launch():
    config = parse_model_config(small_k3())
    [(prologue, choice), _] = prologues(meta_model(config, TP2, 0, torch.bfloat16, FusionConfig()))
    whole, f_b = next(p for p in describe(prologue, choice, config).paths if p.path == "deferred").gemms
    assert [(p.to, p.columns) for p in whole.parts][:3] == [("qkv", 48), ("gate", 16), ("f_b", 8)]
    assert (whole.inside, f_b.inside, f_b.name, f_b.rows, f_b.depth) == (False, True, "f_b", 16, 8)
    assert [(p.to, p.columns) for p in f_b.parts] == [("forget", 16)]


def test_a_dry_run_is_held_against_the_registered_count(monkeypatch):
    config = parse_model_config(small_k3())
    [(prologue, choice), _] = prologues(meta_model(config, TP2, 0, torch.bfloat16, FusionConfig()))
    assert [len(p.gemms) for p in describe(prologue, choice, config).paths] == [5, 3, 2, 3, 2, 2, 7]
    monkeypatch.setitem(KDA_FULL_RANK, "whole", replace(KDA_FULL_RANK["whole"], gemms=3))
    with pytest.raises(AssertionError, match="whole: 2 GEMMs, registered 3"):
        describe(prologue, choice, config)


def test_a_dry_run_is_not_counted_as_work():
    config = parse_model_config(small_k3())
    [(prologue, choice), _] = prologues(meta_model(config, TP2, 0, torch.bfloat16, FusionConfig()))
    with counters.counting() as ran:
        describe(prologue, choice, config)
        counters.add("real work")
    assert ran == {"real work": 1}
