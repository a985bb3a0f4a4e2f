"""Recordings built to the figures that others published, so that the tools must arrive at them.

`decode` follows SGLang pull request 36206 (Kimi-K3, 93 layers, GB300): one decode step is a graph of 23 periods of
three KDA layers and one MLA layer, and a tail of 29 nodes. The published slice is period `SLICE`; its wall time is not
the mean one, or the graph would be longer than it is. `prefill` follows SGLang pull request 47651: PP8, 69 KDA
layers, a 64K prompt in chunks of 16K, so that every KDA layer runs four times.
"""

from helpers.nsys_file import NsysFile

MLA = "void mla::decode_kernel<cutlass::bfloat16_t, 128>(mla::Params)"
CONV = "void causal_conv1d_update<__nv_bfloat16, 4>(ConvParams)"
QKV, QKVG, TAIL = "nvjet_sm103_tst_qkv", "nvjet_sm103_tst_qkvg", "lm_head_tail"
PUBLISHED = {
    # arm: prologues of one period, wall and sum of a period, kernels, nodes and wall of the graph; us
    "unfused": ((140.064, 140.064, 140.176), 1977.695, 2190.766, 114, 2651, 45_262.0),
    "fused": ((117.281, 117.281, 117.135), 1951.731, 2363.971, 105, 2444, 44_807.0),
}
PERIODS, SLICE, TAIL_NODES, TAIL_US = 23, 10, 29, 300
JITTER_NS = (-600, 0, 900)  # of one launch in the slice of each replay: spread over steps, medians untouched


def ns(us):
    return round(us * 1000)


def decode(arm, path, *, device=3):
    """Three replays of one decode step, on two streams."""
    file = NsysFile()
    file.gpu(device, "NVIDIA GB300")
    for replay, jitter in enumerate(JITTER_NS):
        begin = 1_000_000_000 + replay * 60_000_000
        launch = file.replay(begin - 20_000)
        nodes, at = [], 0
        for period in range(PERIODS):
            wall = _wall(arm, period) + (jitter if period == SLICE else 0)
            nodes += _period(arm, at, wall, jitter if period == SLICE else 0)
            at += wall
        nodes += _chain([MLA, *[TAIL] * (TAIL_NODES - 1)], 7, at, ns(PUBLISHED[arm][5]) + jitter - at)
        assert len(nodes) == PUBLISHED[arm][4]
        for number, (name, stream, at, took) in enumerate(nodes, start=1):
            file.kernel(name, begin + at, took, stream=stream, device=device, launch=launch, node=number)
    return file.write(path)


def _wall(arm, period):
    _, wall, _, _, _, graph = PUBLISHED[arm]
    return ns(wall) if period == SLICE else (ns(graph) - ns(TAIL_US) - ns(wall)) // (PERIODS - 1)


def _period(arm, begin, wall, jitter):
    """(name, stream, start, duration) in ns: the MLA layer first, so that its kernel opens the period."""
    prologues, published, summed, kernels, _, _ = PUBLISHED[arm]
    extra = ns(summed) - ns(published)
    beside = [min(extra // 3, ns(took) - 20) for took in prologues]
    mains = kernels - 1 - 3 * (3 if arm == "fused" else 6)
    rest = wall - sum(map(ns, prologues))
    widths = [(rest - jitter) // mains] * (mains - 1)
    widths.append(rest - sum(widths))
    nodes, at = [("shared_expert", 13, begin + 1, extra - sum(beside))], begin
    for place, width in enumerate(widths):
        layer, within = divmod(place, mains // 4)
        opens = within == 0 and 1 <= layer <= 3
        if opens:
            nodes += _prologue(arm, at, ns(prologues[layer - 1]), beside[layer - 1])
            at += ns(prologues[layer - 1])
        nodes.append((MLA if place == 0 else CONV if opens else f"elementwise_{within % 9}", 7, at, width))
        at += width
    return nodes


def _prologue(arm, at, took, beside):
    """GEMMs on the main stream that fill `took`, and on the side stream launches that last `beside` together."""
    main = [QKVG] if arm == "fused" else [QKV, "nvjet_gate", "nvjet_merge"]
    side = ["nvjet_bfa", "nvjet_f_b"] if arm == "fused" else ["nvjet_beta", "nvjet_f_a", "nvjet_f_b"]
    return _chain(main, 7, at, took) + _chain(side, 13, at + 10, beside)


def _chain(names, stream, at, took):
    widths = [took // len(names)] * (len(names) - 1)
    widths.append(took - sum(widths))
    return [
        (name, stream, at + sum(widths[:i]), width) for i, (name, width) in enumerate(zip(names, widths, strict=True))
    ]


def prefill(arm, path):
    """One prompt through eight ranks, each a device: per KDA layer and chunk four copies, or one pack."""
    file = NsysFile()
    layers = [kind for period in range(23) for kind in ("kda", "kda", "kda", "mla")] + ["mla"]
    at = 1_000_000
    for rank in range(8):
        for _ in range(4):
            for kind in layers[rank * 93 // 8 : (rank + 1) * 93 // 8]:
                names = (["pack_inputs"] if arm == "packed" else ["kda_input_copy"] * 4) if kind == "kda" else []
                for name in [*names, f"{kind}_prefill"]:
                    file.kernel(name, at, 900, device=rank)
                    at += 1000
    return file.write(path)
