"""Training through the package's layers: right gradients, a loss that falls, an export that loads, honest data."""

import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.oracle import model_config
from helpers.ref_tiny import Model, kimi_k3_tiny, random_weights

from anabranch import LLM, SamplingParams
from anabranch.config.hf import parse_model_config
from anabranch.evidence.gsm8k import load_test

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import score_small
import train_small
from training.config import EOS, minimal_config, small_config
from training.data import STREAMS, Rows
from training.export import export
from training.fixtures import sha256, write
from training.model import Trainable
from training.optimizer import Optimizer, orthogonal
from training.problems import HELD_OUT, documents, draw, formatted, problem_set
from training.score import bits_per_byte, solved, word_test
from training.step import Step
from training.templates import TEMPLATES

SMALL = Path(__file__).parents[2] / "checkpoints" / "small-k3"


@pytest.fixture(scope="module")
def data_file(tmp_path_factory) -> Path:
    """A small file of the real kinds, without the standard library's text."""
    file = tmp_path_factory.mktemp("data") / "data.bin"
    streams = {
        name: np.frombuffer(
            b"\0".join(d.encode() for d in documents(seed, 30_000, "held_out" in name)) + b"\0", np.uint8
        )
        for seed, name in enumerate(STREAMS)
    }
    with file.open("wb") as out:
        np.savez_compressed(out, about=np.array(json.dumps({"python": "3"})), **streams)
    return file


# ---------------------------------------------------------------- gradients
def test_gradients_equal_the_references(double_precision):
    c = kimi_k3_tiny()
    weights = {name: t.double().requires_grad_() for name, t in random_weights(c, 3).items()}
    ids = torch.randint(0, c.vocab, (2, 37), generator=torch.Generator().manual_seed(1))
    reference = Model(c, weights, dtype=torch.float64)
    want = torch.cat([reference.step(row, reference.new_state()) for row in ids])
    model = Trainable(model_config(c), 2, 37, dtype=torch.float64).double()
    model.load_state_dict({
        name: t.detach().flatten()[: c.kda_heads] if name.endswith("A_log") else t.detach()
        for name, t in weights.items()
    })  # fmt: skip
    got = model(ids)
    assert (got - want).abs().max() < 1e-9
    direction = torch.randn(want.shape, generator=torch.Generator().manual_seed(2))
    (want * direction).sum().backward()
    (got * direction).sum().backward()
    with torch.no_grad():  # the state dict then names the gradients
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    compared = 0
    for name, gradient in model.state_dict().items():
        right = weights[name].grad
        right = torch.zeros_like(weights[name]) if right is None else right
        right = right.flatten()[: c.kda_heads] if name.endswith("A_log") else right
        assert torch.equal(gradient.isnan(), right.isnan())
        assert (gradient - right).abs().max() <= 1e-9 * max(1.0, float(right.abs().max())), name
        compared += bool(right.abs().max() > 0)
    assert compared > 150


def test_every_feature_is_on():
    config = parse_model_config(small_config())
    assert config.kda.gate_lower_bound == -5.0
    assert config.kda.full_rank_gate
    assert config.mla.q_lora_rank
    assert config.mla.output_gate
    assert config.moe is not None
    assert config.moe.latent_size
    assert config.moe.latent_norm
    assert config.moe.shared_experts
    assert config.activation.name == "situ"
    assert config.attn_res_block is not None
    assert config.layers / config.attn_res_block >= 3
    assert parse_model_config(minimal_config()).layer_kinds == config.layer_kinds


# ---------------------------------------------------------------- steps
def test_a_short_run_learns_and_writes_a_checkpoint(data_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ANABRANCH_RESULTS", str(tmp_path))
    out = tmp_path / "model"
    sizes = ["--rows", "4", "--length", "96", "--rate", "0.02", "--steps", "24", "--report-every", "1e9"]
    sizes += ["--minimal", "--minutes", "60", "--data", str(data_file), "--out", str(out)]
    assert train_small.main(sizes) == 0
    [row] = [json.loads(line) for line in (tmp_path / "train_small.jsonl").read_text().splitlines()]
    # untrained: log2 of 272, 8.1 bits
    assert all(bits < 7.5 for bits in row["held_out_bits_per_byte"].values())
    assert row["step"] == 24
    assert "written after 24 steps" in capsys.readouterr().out
    [output] = LLM(out).generate(["Question:"], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("change", "said"), [(["--rows", "0"], "--rows=0: need more than 0"), (["--minutes", "-1"], "--minutes=-1.0")]
)
def test_bad_options_are_named(change, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_small.main(["--data", "x", "--out", "y", *change])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"x: need a file written by training\.data"):
        Rows.load(tmp_path / "x", 1, 8, "cpu")


def test_padding_stays_zero_and_loads_move_the_bias(data_file):
    model = Trainable(parse_model_config(minimal_config()), 2, 64)
    model.initialise(0)
    rows = Rows.load(data_file, 2, 64, "cpu")
    step = Step(model, Optimizer(model), rows)
    rows.choose(np.random.default_rng(0))
    step(0.01, 0.001)
    assert model.load.sum(-1).tolist() == [2 * 64 * 2] * 8
    for router, load in zip(model.routers, model.load, strict=True):
        moved = router.e_score_correction_bias / 0.001
        assert torch.equal(moved.round(), torch.sign(load.mean() - load))
    attention = model.model.layers["0"].self_attn
    assert attention.in_proj.rows("pad").abs().max() == 0


def test_an_evaluation_changes_nothing(data_file):
    model = Trainable(parse_model_config(minimal_config()), 2, 64)
    model.initialise(0)
    rows = Rows.load(data_file, 2, 64, "cpu")
    step = Step(model, Optimizer(model), rows)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    rows.choose(np.random.default_rng(0), held_out="problems_held_out")
    first, second = step.evaluate(), step.evaluate()
    assert torch.equal(first, second)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model.load.abs().max() == 0


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 17, 40), (1, 64, 16)])
def test_muon_directions_are_nearly_orthogonal(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(x))
    assert values.min() > 0.3  # the quintic leaves values around 1, on purpose not at it
    assert values.max() < 1.4
    assert (orthogonal(x) * x).sum() > 0


# ---------------------------------------------------------------- export
def test_an_export_holds_the_same_model(tmp_path):
    raw = minimal_config()
    model = Trainable(parse_model_config(raw), 1, 40, dtype=torch.bfloat16)
    model.initialise(3)
    export(model, raw, tmp_path)
    loaded = LLM(tmp_path, dtype="bfloat16").model
    want = model.state_dict()
    for name, got in loaded.state_dict().items():
        assert torch.equal(got, want[name]), name


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    model = Trainable(parse_model_config(minimal_config()), 1, 8)
    model.initialise(0)
    with torch.no_grad():
        model.lm_head.weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"lm_head\.weight has values that are not finite"):
        export(model, minimal_config(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- data
def test_worked_answers_are_right():
    rng, seen = random.Random(5), set()
    for i in range(4000):
        problem = draw(rng, held_out=i % 2 == 0)
        template = TEMPLATES[problem.template]
        names = dict(zip(template.ranges, problem.numbers, strict=True))
        assert eval(template.whole, {}, dict(names)) == problem.result
        assert problem.answer.endswith(f"\n#### {problem.result}")
        sums = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", problem.answer)
        assert len(sums) == len(template.steps) == problem.answer.count("=")
        assert all(eval(f"{x}{sign}{y}") == int(total) for x, sign, y, total in sums)
        for number in problem.numbers:
            assert re.search(rf"\b{number}\b", problem.question), problem.question
        assert not re.search(r"[{}<>|\[\]]", problem.question + problem.answer)
        seen.add(problem.template)
    assert seen == set(range(len(TEMPLATES)))


def test_held_out_problems_never_occur_in_training():
    rng = random.Random(0)
    training = {draw(rng, False).question for _ in range(20_000)}
    kept = problem_set(2026, 200)
    assert all(problem.held_out for problem in kept)
    assert training.isdisjoint(problem.question for problem in kept)
    rng = random.Random(9)
    drawn = [draw(rng, False) for _ in range(500)]
    assert not any(problem.held_out for problem in drawn)
    assert HELD_OUT > 1


def test_documents_have_the_form_of_the_prompt(data_file, tmp_path):
    write(tmp_path)
    test = word_test(tmp_path)
    assert (len(test.questions), len(test.shots)) == (200, 5)
    worked, _, asked = test.prompt(test.questions[0]).rpartition("\n\n")
    block = re.compile(r"Question: [^\n]+\nAnswer: (?:[^\n]+\n)+#### \d+")
    assert all(block.fullmatch(part) for part in worked.split("\n\n"))
    assert asked == f"Question: {test.questions[0].question}\nAnswer:"
    assert max(len(test.prompt(q)) + len(q.answer) for q in test.questions) < 1600
    for text in documents(1, 3000, held_out=False):
        assert all(block.fullmatch(part) for part in text.split("\n\n"))
    assert formatted(draw(random.Random(0), False)).startswith("Question: ")


def test_shipped_problem_files_are_those_of_the_script(tmp_path):
    write(tmp_path)
    for name in ("problems.jsonl", "shots.jsonl"):
        assert sha256(SMALL / name) == sha256(tmp_path / name), name
    load_test(SMALL / "problems.jsonl", sha256(SMALL / "problems.jsonl"), SMALL / "shots.jsonl")


def test_rows_start_at_documents_and_end_marks_become_eos(data_file):
    rows = Rows.load(data_file, 8, 400, "cpu")
    rows.choose(np.random.default_rng(2), held_out="problems_held_out")
    tokens, targets = rows.take()
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.max() == EOS
    assert (tokens == 0).sum() == 0
    assert all(bytes(row[:10].tolist()) == b"Question: " for row in tokens)


def test_rows_come_from_both_streams(data_file):
    rows = Rows.load(data_file, 400, 32, "cpu")
    rows.choose(np.random.default_rng(0))
    inside = np.isin(rows.positions.numpy(), rows.starts["problems"])
    assert 0.55 < inside.mean() < 0.75
    assert np.isin(rows.positions.numpy()[~inside], rows.starts["text"]).all()


# ---------------------------------------------------------------- score and card
def test_score_and_card_from_rows(data_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ANABRANCH_RESULTS", str(tmp_path))
    out = tmp_path / "model"
    sizes = ["--rows", "2", "--length", "64", "--steps", "3", "--minimal", "--minutes", "60", "--report-every", "1e9"]
    assert train_small.main([*sizes, "--data", str(data_file), "--out", str(out)]) == 0
    write(out)
    held_out = (out / "held_out.jsonl").read_text().splitlines()
    (out / "held_out.jsonl").write_text("\n".join(held_out[:2] + held_out[-2:]) + "\n")
    llm = LLM(out)
    bits = bits_per_byte(llm, out)
    assert set(bits) == {"problems", "text"}
    assert all(5 < value < 12 for value in bits.values())
    percent, answers = solved(llm, word_test(out, 2))
    assert percent in (0.0, 50.0, 100.0)
    assert len(answers) == 2
    monkeypatch.setattr(score_small, "pinned_tokens", lambda path: {"x": [1]})
    rows = tmp_path / "train_small.jsonl"
    assert score_small.main([str(out), "--limit", "1", "--card", "--rows", str(rows)]) == 0
    text = (out / "README.md").read_text()
    assert "124,608 parameters" in text
    assert "{" not in text
    assert (out / "loss.svg").read_text().startswith("<svg")
    assert json.loads((out / "pinned.json").read_text())["tokens"] == {"x": [1]}
    assert "solved_pct" in capsys.readouterr().out
