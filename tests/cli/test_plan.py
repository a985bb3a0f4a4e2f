"""`anabranch plan`: the acceptance layouts, the bytes against the published counts and against real allocation."""

import json
import re

import pytest
from helpers.configs import K3_FILE, KL_FILE
from typer.testing import CliRunner

from anabranch.cli.main import app
from anabranch.cli.plan import parse_bytes
from anabranch.config.hf import load_model_config
from anabranch.fusion.costs import FORMAT, shape_key


def text(*words):
    result = CliRunner().invoke(app, ["plan", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*words):
    return json.loads(text(*words, "--json"))


def refusal(*words):
    result = CliRunner().invoke(app, ["plan", *map(str, words)])
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def rows(doc, kind, path):
    prologue = next(p for p in doc["prologues"] if p["kind"] == kind)
    return {g["name"]: g["rows"] for p in prologue["paths"] if p["path"] == path for g in p["gemms"]}


DP16 = (K3_FILE, "--tp", 16, "--dp-attention", 16, "--ep", 16)


def test_k3_with_attention_replicas_keeps_whole_heads_on_every_rank():
    out = text(*DP16)
    assert "QKVG split 36864 | 12288 (qkv, gate)" in out
    assert "5 -> 3 GEMMs" in out
    assert "layout: tp 16 = dp-attention 16 x attention-TP 1, ep 16, pp 1; ranks 16" in out


def test_k3_tp8_has_the_6288_row_buffer():
    out = text(K3_FILE, "--tp", 8)
    assert "buffer 6288 rows x 7168: q 1536 | k 1536 | v 1536 | g 1536 | f_a 128 | b 12 | pad 4" in out
    assert "QKVG 6144, BFA 144, f_b 1536" in out
    assert "BFA split 128 | 12 | 4 (f_b, beta, pad)" in out


@pytest.mark.parametrize(
    ("tp", "qkvg", "bfa", "whole", "f_b", "qkv_a_g"),
    [
        (1, 49152, 224, 49376, 12288, 14400),
        (4, 12288, 160, 12448, 3072, 5184),
        (8, 6144, 144, 6288, 1536, 3648),
        (16, 3072, 144, 3216, 768, 2880),
        (32, 1536, 144, 1680, 384, 2496),
    ],
)
def test_k3_rows_at_every_documented_size(tp, qkvg, bfa, whole, f_b, qkv_a_g):
    doc = document(K3_FILE, "--tp", tp)
    assert rows(doc, "kda", "split") == {"QKVG": qkvg, "BFA": bfa, "f_b": f_b}
    assert rows(doc, "kda", "whole") == {"whole": whole, "f_b": f_b}
    assert rows(doc, "kda", "overlap") == {"QKVG": qkvg, "BFA": bfa, "f_b": f_b}
    assert rows(doc, "mla", "overlap") == {"QKV-A": 2112, "g": 12288 // tp}
    assert rows(doc, "kda", "separate") == {
        "QKV": qkvg * 3 // 4, "g": qkvg // 4, "f_a": 128, "b": 96 // tp, "f_b": f_b,
    }  # fmt: skip
    assert rows(doc, "mla", "separate") == {"QKV-A": 2112, "g": 12288 // tp}
    assert rows(doc, "mla", "merged") == {"whole": qkv_a_g}


@pytest.mark.parametrize(("tp", "whole", "tail", "wide"), [(1, 12576, 288, 12288), (8, 1808, 272, 1536)])
def test_kimi_linear_rows(tp, whole, tail, wide):
    doc = document(KL_FILE, "--tp", tp)
    second = 2 * 4096 // tp
    assert rows(doc, "kda", "split") == {"QKV": wide, "tail": tail, "f_b+g_b": second}
    assert rows(doc, "kda", "whole") == {"whole": whole, "f_b+g_b": second}
    assert [len(p["gemms"]) for p in doc["prologues"][0]["paths"]][:4] == [6, 3, 2, 3]
    merged = doc["prologues"][1]["paths"][1]
    assert (merged["ok"], merged["gemms"]) == (False, [])
    assert "no MLA output gate" in merged["reason"]
    assert doc["prologues"][1]["chosen"] == "separate"


def test_every_column_of_a_gemm_is_read_once_or_pad():
    for config, tp in ((K3_FILE, 8), (KL_FILE, 8), (K3_FILE, 32)):
        for prologue in document(config, "--tp", tp)["prologues"]:
            for path in prologue["paths"]:
                for gemm in path["gemms"]:
                    assert sum(p["columns"] for p in gemm["parts"]) == gemm["rows"]
    whole = document(K3_FILE, "--tp", 8)["prologues"][0]["paths"][2]["gemms"][0]
    assert [(p["to"], p["columns"]) for p in whole["parts"]] == [
        ("qkv", 4608), ("gate", 1536), ("f_b", 128), ("beta", 12), ("pad", 4),
    ]  # fmt: skip


def test_state_and_latent_bytes_are_the_published_ones():
    kl, k3 = (document(f)["footprints"][0] for f in (KL_FILE, K3_FILE))
    assert (kl["state_bytes_per_request"], kl["latent_bytes_per_token"]) == (43_417_600, 8_064)
    assert (k3["state_bytes_per_request"], k3["latent_bytes_per_token"]) == (449_372_160, 27_648)
    for file, state in ((KL_FILE, 5_427_200), (K3_FILE, 56_171_520)):
        assert document(file, "--tp", 8)["footprints"][0]["state_bytes_per_request"] == state
    out = text(K3_FILE)
    assert "449,372,160" in out
    assert "27,648" in out
    half = document(K3_FILE, "--state-dtype", "bfloat16")["footprints"][0]["state_bytes_per_request"]
    assert half == 69 * (96 * 128 * 128 * 2 + 221_184)


def test_stages_are_reported_one_by_one_and_add_up():
    one, four = document(K3_FILE, "--tp", 8), document(K3_FILE, "--tp", 8, "--pp", 4)
    assert [f["ranks"] for f in four["footprints"]] == [[0, 7], [8, 15], [16, 23], [24, 31]]
    assert [f["layers"] for f in four["footprints"]] == [[0, 24], [24, 47], [47, 70], [70, 93]]
    for key in ("weight_bytes", "pad_bytes", "state_bytes_per_request", "latent_bytes_per_token", "kda_layers"):
        assert sum(f[key] for f in four["footprints"]) == one["footprints"][0][key]
    assert four["weight_bytes_all_ranks"] == one["weight_bytes_all_ranks"] == 8 * one["footprints"][0]["weight_bytes"]
    single = document(K3_FILE, "--tp", 8, "--pp", 4, "--rank", 17)
    assert single["footprints"] == [four["footprints"][2]]
    assert single["place"] == {
        "rank": 17, "tp_size": 8, "tp_rank": 1, "attn_tp_size": 8, "attn_tp_rank": 1, "ep_size": 1, "ep_rank": 0,
        "pp_size": 4, "pp_rank": 2,
    }  # fmt: skip
    assert "rank 17: pp 2 of 4, tp 1 of 8, attn_tp 1 of 8, ep 0 of 1" in text(
        K3_FILE, "--tp", 8, "--pp", 4, "--rank", 17
    )


def test_how_many_requests_fit():
    doc = document(*DP16, "--memory", "192GB", "--len", 32768)
    weights = doc["footprints"][0]["weight_bytes"]
    each = (192 * 10**9 - weights) // (449_372_160 + 32768 * 27_648)
    assert each == 9
    assert doc["capacity"] == {
        "memory": 192 * 10**9, "tokens": 32768, "requests_per_replica": 9, "replicas": 16, "requests": 144,
    }  # fmt: skip
    assert document(*DP16, "--memory", "100GB", "--len", 1)["capacity"]["requests"] == 0
    assert document(KL_FILE, "--memory", "141GB")["capacity"]["tokens"] == 1 << 20
    assert document(KL_FILE)["capacity"] is None


@pytest.mark.parametrize(
    ("written", "size"),
    [("141GB", 141 * 10**9), ("80GiB", 80 * 2**30), ("1.5 KB", 1500), ("7", 7), ("7B", 7), ("2TiB", 2 * 2**40)],
)
def test_sizes(written, size):
    assert parse_bytes(written) == size


@pytest.mark.parametrize("written", ["", "GB", "1 XB", "-1GB", "1e9", "1gb"])
def test_sizes_that_are_none(written):
    with pytest.raises(ValueError, match="need a number and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"):
        parse_bytes(written)


def test_what_runs_beside_is_said():
    out = text(K3_FILE, "--tp", 8)
    assert "QKVG 6144, BFA 144 beside, f_b 1536 beside" in out
    assert "QKV-A 2112, g 1536 beside" in out


def measured_table(tmp_path):
    """A cost table of the Kimi-K3 shapes at attention-TP 8 on an imaginary device."""
    config = load_model_config(K3_FILE)
    mla = {"merged": 300.0, "separate": 305.0, "overlap": 299.5}
    cells = [
        {"kind": kind, "shape": shape_key(config, kind, 8, "bfloat16"), "graph": True, "deterministic": False,
         "rows": m, "context": c, "us": us, "spread_us": 1.0}
        for kind, m, c, us in (
            ("kda", 1, 512, {"whole": 300.0, "overlap": 280.0, "split": 310.0}),
            ("kda", 64, 512, {"whole": 330.0, "overlap": 331.0, "split": 350.0}),
            ("kda", 128, 512, {"whole": 340.0, "overlap": 360.0, "split": 350.0}),
            ("mla", 1, 512, mla), ("mla", 1, 4096, mla | {"overlap": 290.0}),
        )
    ]  # fmt: skip
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"format": FORMAT, "device": "Imaginary 1", "runs": [{}], "cells": cells}))
    return file


def test_explain_shows_the_numbers_behind_every_choice(tmp_path):
    file = measured_table(tmp_path)
    out = text(K3_FILE, "--tp", 8, "--fusion", f"table={file}", "--explain")
    assert "KDA measured on Imaginary 1, us a four-layer chain" in out
    assert "chosen: whole or overlap (auto, measured on Imaginary 1: in graphs overlap to M=64, then whole)" in out
    assert re.search(r"graph +1 +512 +300\.0 +\*280\.0 +310\.0 +1\.0", out)
    assert re.search(r"graph +64 +512 +330\.0 +\*331\.0 +350\.0 +1\.0", out)
    assert re.search(r"graph +1 +any +10\.0 +15\.0 +\*0\.0 +1\.0", out)
    assert re.search(r"graph +1 +512 +\*300\.0 +305\.0 +299\.5 +1\.0", out)
    found = document(K3_FILE, "--tp", 8, "--fusion", f"table={file}", "--explain")["measured"]
    assert [(f["kind"], f["default"], len(f["cells"])) for f in found] == [("kda", "whole", 3), ("mla", "merged", 3)]
    assert list(found[0]["cells"][0]) == ["graph", "rows", "context", "path", "us", "spread_us"]


def test_explain_without_numbers_says_so(tmp_path):
    assert "no measured times for this model and layout" in text(KL_FILE, "--tp", 32, "--explain")
    assert refusal(KL_FILE, "--fusion", f"table={measured_table(tmp_path)}").endswith(
        "nothing about Imaginary 1, this model's shapes and normal mode\n"
    )
    assert "No such file" in refusal(KL_FILE, "--fusion", "table=/nowhere.json")


def test_an_asked_path_is_taken_or_refused():
    out = text(K3_FILE, "--tp", 8, "--fusion", "kda=split", "--fusion", "mla=separate")
    assert re.search(r"^\* split", out, re.MULTILINE)
    assert "chosen: split (asked for)" in out
    assert "chosen: separate (asked for)" in out
    left = text(K3_FILE, "--tp", 8, "--fusion", "kda=deferred")
    assert re.search(r"^\* deferred +ok, 5 -> 1 GEMM +whole 6288, f_b 1536 inside", left, re.MULTILINE)
    assert refusal(KL_FILE, "--fusion", "kda=deferred") == (
        "error: fusion kda=deferred cannot be honoured: behind a low-rank gate g_b needs a launch of its own, and f_b "
        "rides in it\n"
    )
    assert refusal(KL_FILE, "--fusion", "mla=merged") == (
        "error: fusion mla=merged cannot be honoured: this model has no MLA output gate to merge\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", 5], "KDA heads (num_heads)=96 is not divisible by attention-TP (tp / dp_attention)=5"),
        (["--tp", 8, "--dp-attention", 3], "dp_attention=3 does not divide tp=8"),
        (["--tp", 8, "--ep", 16], "ep=16 does not divide tp=8"),
        (["--pp", 94], "pp=94: the model has 93 layers"),
        (["--tp", 0], "tp=0: need at least 1"),
        (["--tp", 8, "--rank", 8], "rank=8: need 0 <= rank < 8"),
        (["--dtype", "int8"], "dtype='int8': accepted are float32, bfloat16, float16"),
        (["--state-dtype", "float16"], "state-dtype='float16': accepted are float32, bfloat16"),
        (["--fusion", "kda"], "fusion option 'kda' is not KIND=PATH with KIND one of kda, mla, nor table=FILE"),
        (["--len", 5], "--len says nothing without --memory"),
        (["--memory", "1GB", "--len", 0], "len=0: need at least 1"),
        (["--memory", "0GB"], "memory=0: need at least 1"),
        (["--memory", "1GB", "--len", 1 << 21], "len=2097152 exceeds the model's context of 1048576"),
    ],
)
def test_refusals_are_one_line_and_status_2(words, message):
    assert refusal(K3_FILE, *words) == f"error: {message}\n"


def test_text_fits_in_100_columns_without_colour(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    for words in ((K3_FILE, "--tp", 8, "--pp", 3, "--rank", 3, "--memory", "141GB"), (KL_FILE,), DP16):
        out = text(*words)
        assert max(map(len, out.splitlines())) <= 100
        assert "\x1b" not in out
        assert "..." not in out


def test_nothing_but_the_config_is_read(tmp_path):
    (tmp_path / "config.json").write_text(KL_FILE.read_text())
    by_file, by_directory = document(KL_FILE), document(tmp_path)
    assert by_directory.pop("config") == str(tmp_path)
    by_file.pop("config")
    assert by_directory == by_file


def test_the_keys_of_the_document_are_stable():
    doc = document(K3_FILE, "--tp", 8)
    assert list(doc) == [
        "anabranch", "config", "model", "layout", "dtype", "state_dtype", "prologues", "place", "ranks", "footprints",
        "weight_bytes_all_ranks", "capacity",
    ]  # fmt: skip
    assert doc["layout"] == {"tp": 8, "dp_attention": 1, "ep": 1, "pp": 1, "attention_tp": 8, "ranks": 8}
    prologue = doc["prologues"][0]
    assert list(prologue) == ["kind", "buffers", "paths", "chosen", "reason"]
    assert list(prologue["buffers"][0]) == ["segments", "pad", "rows", "depth", "format", "bytes"]
    assert list(prologue["paths"][0]) == ["path", "ok", "reason", "gemms"]
    assert list(prologue["paths"][0]["gemms"][0]) == ["name", "rows", "depth", "batch", "parts", "side", "inside"]
    assert list(doc["footprints"][0]) == [
        "ranks", "layers", "kda_layers", "mla_layers", "weight_bytes", "pad_bytes", "fusion_bytes",
        "state_bytes_per_request", "latent_bytes_per_token",
    ]  # fmt: skip


def test_every_rank_is_told_what_it_holds():
    ranks = document(K3_FILE, "--tp", 4, "--dp-attention", 2, "--ep", 4, "--pp", 2)["ranks"]
    assert [r["rank"] for r in ranks] == list(range(8))
    assert {(r["kda_heads"], r["mla_heads"]) for r in ranks} == {(48, 48)}
    assert [r["replica"] for r in ranks] == [0, 0, 1, 1] * 2
    assert [r["experts"] for r in ranks[:4]] == [[0, 224], [224, 448], [448, 672], [672, 896]]
    assert [r["layers"] for r in ranks] == [[0, 47]] * 4 + [[47, 93]] * 4
    assert [r["rank"] for r in ranks if r["samples"]] == [4, 6]
