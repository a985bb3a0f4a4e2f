"""The verbs of single operations where there is no GPU: one line, status 2, and nothing of Triton is imported."""

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from anabranch.cli.bench_ops import lines, shapes_of
from anabranch.cli.main import app
from anabranch.measure.arms import ArmTimes, Least, time_arms
from anabranch.measure.timing import COPY_BYTES_PER_S, Timed
from anabranch.ops.spec import Floor

VERBS = ("pack", "conv", "kda-prefill", "kda-decode", "gate", "fp8-linear")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@NO_GPU
@pytest.mark.parametrize("verb", VERBS)
def test_without_a_gpu_a_verb_is_refused_in_one_line(verb):
    result = CliRunner().invoke(app, ["bench", verb])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: bench {verb} needs a CUDA GPU, this machine has none\n"


@NO_GPU
def test_refusing_imports_no_kernel():
    program = "import sys; from anabranch.cli.main import app\n"
    program += "try: app(['bench', 'kda-decode'])\nexcept SystemExit: print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pack", "--cases", "96"), "cases='96': need NxN of positive numbers, with commas between them"),
        (("conv", "--cases", "1x2x0"), "cases='1x2x0': need NxNxN"),
        (("kda-prefill", "--cases", "12x64"), "cases='12x64': need NxNxN"),
        (("kda-decode", "--cases", "12x8,a"), "cases='12x8,a': need NxN"),
        (("gate", "--cases", ""), "cases='': need NxN"),
        (("fp8-linear", "--rows", "0"), "rows='0': need positive numbers"),
    ],
)
def test_bad_cases_are_one_line_and_status_2(words, message):
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_cases():
    assert shapes_of("cases", "96x16384, 12x4096", 2) == [(96, 16384), (12, 4096)]


def test_arms_take_the_sets_in_turn_and_the_same_number_of_times():
    seen = {"a": [], "b": []}
    result = time_arms(
        "it",
        {"n": 1},
        {name: calls.append for name, calls in seen.items()},
        [10, 20, 30],
        torch.device("cpu"),
        least={"a": Least(8, 2.0), "b": Least(4, 1.0) + Least(4, 1.0)},
        equality="bitwise",
        calls=4,
    )
    turn = [10, 20, 30] * 2
    # a warm-up and 15 samples; the first arm also times itself: the A/A before, its twin's warm-up, and four samples
    assert seen["b"] == turn * (1 + 15)
    assert seen["a"] == turn * (1 + 15 + 5 + 1 + 5 + 15)
    assert [row["floor_us"] for row in result.rows()] == [2.0, 2.0]
    assert Least.of(Floor(bytes=4300, flops=0)) == Least(4300, 4300 / COPY_BYTES_PER_S * 1e6)


def test_a_difference_inside_the_spread_is_none():
    us = {"first": [10.0] * 3, "near": [10.4] * 3, "far": [20.0] * 3}
    timed = Timed(us=us, spread_us=0.5)
    least = dict.fromkeys(us, Least(10_000, 5.0))
    result = ArmTimes(bench="it", case={"m": 1}, timed=timed, least=least, equality="bitwise", clocks=None)
    head, *arms = lines(result)
    assert head == "it m 1: A/A 5.0 %, gate green (bitwise)"
    assert arms[0].split() == ["first", "10.00", "us", "2.00x", "floor", "1", "GB/s"]
    assert arms[1].endswith("no difference")
    assert arms[2].endswith("2.00x first")
