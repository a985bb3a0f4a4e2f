"""Recordings of both kinds come out as the same events, to the nanosecond; what cannot be read is said in one line."""

import gzip
import json

import pytest
import torch
from helpers.nsys_file import NsysFile

from anabranch.evidence.trace.events import CPU, Place, short
from anabranch.evidence.trace.load import load_trace


def chrome(*rows, **keys):
    return {"schemaVersion": 1, "baseTimeNanoseconds": 1790857026000000000, "traceEvents": list(rows), **keys}


def kernel(name, ts, dur, *, stream=7, device=0, correlation=1, cat="kernel"):
    arguments = {"device": device, "stream": stream, "correlation": correlation, "grid": [1, 1, 1]}
    return {"ph": "X", "cat": cat, "name": name, "pid": device, "tid": stream, "ts": ts, "dur": dur, "args": arguments}


def call(name, ts, correlation, tid=88):
    arguments = {"correlation": correlation, "cbid": 311}
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": name,
        "pid": 88,
        "tid": tid,
        "ts": ts,
        "dur": 3.5,
        "args": arguments,
    }


def write(path, document):
    text = json.dumps(document)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "without-a-suffix"])
def test_chrome_keeps_every_nanosecond_of_a_time_that_a_double_cannot(tmp_path, name):
    # 2^53 ns are 104 days; an epoch time in us with 3 decimals is beyond
    rows = [
        '{"ph":"X","cat":"kernel","name":"k","pid":5,"tid":7,"ts":1790857026123456.789,"dur":0.001,'
        '"args":{"device":5,"stream":7,"correlation":3}}',
        '{"ph":"X","cat":"kernel","name":"k","pid":5,"tid":7,"ts":1790857026123457,"dur":2,'
        '"args":{"device":5,"stream":7,"correlation":4}}',
    ]
    text = f'{{"schemaVersion":1,"traceEvents":[{",".join(rows)}]}}'
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    first, second = load_trace(path).events
    assert (first.start, first.took) == (1790857026123456789, 1)
    assert (second.start, second.took) == (1790857026123457000, 2000)
    assert first.place == Place(0, 5)


def test_chrome_kernels_know_their_launch_and_whether_a_graph_made_it(tmp_path):
    document = chrome(
        call("cudaGraphLaunch", 1.0, 41),
        call("cudaLaunchKernel", 2.0, 42, tid=89),
        kernel("a", 10.0, 1.0, correlation=41),
        kernel("b", 10.5, 2.0, correlation=41, stream=13),
        kernel("c", 20.25, 1.0, correlation=42),
        kernel("Memcpy DtoD", 22.0, 1.0, correlation=43, cat="gpu_memcpy"),
        kernel("Memset", 24.0, 1.0, correlation=44, cat="gpu_memset"),
        {"ph": "X", "cat": "user_annotation", "name": "step", "pid": 88, "tid": 88, "ts": 0.5, "dur": 1.25, "args": {}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 88, "tid": 88, "ts": 0.6, "dur": 1.0, "args": {}},
        deviceProperties=[{"id": 0, "name": "NVIDIA H200"}],
    )
    trace = load_trace(write(tmp_path / "t.json", document))
    seen = [(e.name, e.kind, e.stream, e.graph, e.launched, e.thread) for e in trace.events]
    assert seen == [
        ("a", "kernel", 7, True, 1000, 88),
        ("b", "kernel", 13, True, 1000, 88),
        ("c", "kernel", 7, False, 2000, 89),
        ("Memcpy DtoD", "memcpy", 7, False, None, None),
        ("Memset", "memset", 7, False, None, None),
    ]
    assert trace.ranges[0] == ("step", 500, 1750, 88)
    assert trace.devices == {0: "NVIDIA H200"}
    on_host = load_trace(tmp_path / "t.json", "cpu")
    assert [(e.name, e.place.device) for e in on_host.events] == [("aten::mm", CPU)]


def test_a_recording_of_the_host_counts_no_time_twice(tmp_path):
    x = torch.randn(8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            with torch.profiler.record_function("step"):
                torch.nn.functional.linear(x, x).relu()
    profile.export_chrome_trace(str(tmp_path / "cpu.json"))
    trace = load_trace(tmp_path / "cpu.json")
    assert [event.name for event in trace.events] == ["aten::linear", "aten::relu"] * 3
    assert all(a.end <= b.start for a, b in zip(trace.events, trace.events[1:], strict=False))
    assert [r.name for r in trace.ranges] == ["step"] * 3
    assert "outermost" in trace.notes[0]
    with pytest.raises(ValueError, match="no GPU events"):
        load_trace(tmp_path / "cpu.json", "gpu")


@pytest.fixture
def export():
    """Two devices and two processes; one graph replay, one plain launch, a copy and a fill."""
    file = NsysFile()
    launch = file.replay(90_000)
    file.kernel("void gemm<float>(P)", 100_000, 5000, device=2, launch=launch, node=11)
    file.kernel("norm", 104_000, 3000, device=2, stream=13, launch=launch, node=12)
    file.copy(200_000, 700, kind=1, device=2)
    file.fill(210_000, 300, device=2)
    file.kernel("other", 100_500, 800, device=0, process=77)
    file.range("step", 80_000, 100_000)
    file.range("by id", 80_500, 10, by_id=True)
    file.range("mark", 81_000, 0, kind=34)
    file.gpu(2, "NVIDIA H200")
    return file


def test_nsys_events_of_all_tables_devices_and_processes(export, tmp_path):
    trace = load_trace(export.write(tmp_path / "t.sqlite"))
    here, there = Place(4242, 2), Place(77, 0)
    assert [(e.name, e.kind, e.start, e.end, e.place, e.stream, e.node) for e in trace.events] == [
        ("void gemm<float>(P)", "kernel", 100_000, 105_000, here, 7, 11),
        ("other", "kernel", 100_500, 101_300, there, 7, None),
        ("norm", "kernel", 104_000, 107_000, here, 13, 12),
        ("Memcpy HtoD", "memcpy", 200_000, 200_700, here, 7, None),
        ("Memset", "memset", 210_000, 210_300, here, 7, None),
    ]
    assert [e.graph for e in trace.events] == [True, False, True, False, False]
    assert [e.launched for e in trace.events] == [90_000, 95_500, 90_000, 195_000, 205_000]
    assert [(r.name, r.start, r.end) for r in trace.ranges] == [("step", 80_000, 180_000), ("by id", 80_500, 80_510)]
    assert {r.thread for r in trace.ranges} == {e.thread for e in trace.events if e.place == here}
    assert trace.devices == {2: "NVIDIA H200"}


def test_the_first_place_is_taken_and_that_is_said(export, tmp_path):
    trace = load_trace(export.write(tmp_path / "t.sqlite"))
    one = trace.on()
    assert {e.place for e in one.events} == {Place(77, 0)}
    assert "2 devices fit; taken is cuda:0 of process 77" in one.notes[-1]
    assert len(trace.on(device=2).events) == 4
    assert trace.on(device=2).notes == ()
    with pytest.raises(ValueError, match=r"device=1 has no events; there are cuda:0 of process 77, cuda:2 of process"):
        trace.on(device=1)
    with pytest.raises(ValueError, match="device=2, process=77 has no events"):
        trace.on(device=2, process=77)


@pytest.mark.parametrize(
    "missing",
    [("graphNodeId",), ("globalPid", "globalTid"), ("greenContextId", "correlationId"), ("textId", "domainId")],
)
def test_columns_of_other_versions_may_be_missing(export, tmp_path, missing):
    trace = load_trace(
        NsysFile(without=missing, rows=export.rows, _strings=export._strings).write(tmp_path / "t.sqlite")
    )
    assert [e.name for e in trace.events] == ["void gemm<float>(P)", "other", "norm", "Memcpy HtoD", "Memset"]
    # without node numbers, the call that launched them still says that it was a graph
    assert [e.graph for e in trace.events if e.name == "norm"] == [True]


def test_a_needed_column_that_is_missing_is_named(export, tmp_path):
    path = NsysFile(without=("streamId",), rows=export.rows, _strings=export._strings).write(tmp_path / "t.sqlite")
    with pytest.raises(ValueError, match="CUPTI_ACTIVITY_KIND_KERNEL has no column streamId"):
        load_trace(path)


@pytest.mark.parametrize("kernels_too", [False, True])
def test_graphs_without_their_kernels_are_refused_with_the_flag(tmp_path, kernels_too):
    file = NsysFile()
    for number in range(3):
        file.whole_graph(1000 * number, 900, file.replay(1000 * number))
    if kernels_too:  # eager launches beside them would look like the whole program
        file.kernel("sampler", 5000, 10)
    with pytest.raises(ValueError, match=r"3 graph replays are one row each.*--cuda-graph-trace=node"):
        load_trace(file.write(tmp_path / "t.sqlite"))


def test_what_nsys_warned_of_is_a_note(export, tmp_path):
    export.diagnostic("some\nCUDA events were dropped", 2)
    export.diagnostic("just started", 1)
    assert load_trace(export.write(tmp_path / "t.sqlite")).notes == ("nsys: some CUDA events were dropped",)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.json", b'{"traceEvents": [', "not valid JSON"),
        ("t.json", b'{"rows": []}', "no list 'traceEvents'"),
        ("t.json", b'{"traceEvents": []}', "no GPU events in 0 rows"),
        ("t.gz", b"\x1f\x8b broken", "broken gzip"),
        ("t.sqlite", b"SQLite format 3\0 and no more", "broken SQLite file"),
        ("t.nsys-rep", b"\0\1\2", "nsys export --type sqlite"),
        ("t.txt", b"", "not a trace"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says) as error:
        load_trace(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_other_databases_and_missing_files_are_refused(tmp_path):
    path = NsysFile().write(tmp_path / "empty.sqlite")
    with pytest.raises(ValueError, match="no kernels, copies or fills"):
        load_trace(path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_trace(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="on='tpu': accepted are auto, gpu, cpu"):
        load_trace(path, "tpu")
    with pytest.raises(ValueError, match="on='cpu' needs a torch"):
        load_trace(path, "cpu")


@pytest.mark.parametrize(
    ("name", "brief"),
    [
        ("void cutlass::gemm<float, Shape<(int)128> >(Params, int)", "cutlass::gemm"),
        ("void (anonymous namespace)::softmax<4>(float*)", "softmax"),
        ("nvjet_tst_128x64", "nvjet_tst_128x64"),
        ("<lambda>", "<lambda>"),
    ],
)
def test_names_are_shortened_to_what_people_say(name, brief):
    assert short(name) == brief


def test_a_long_name_keeps_both_ends():
    name = "triton_" + "x" * 90 + "_17"
    assert len(short(name, 40)) == 40
    assert (short(name, 40)[:7], short(name, 40)[-3:]) == ("triton_", "_17")
