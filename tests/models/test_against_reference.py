"""Both models against the torch-only reference: prefill, every split of it, decode, mixed batches."""

import pytest
import torch
from helpers.oracle import Session, engine_model
from helpers.ref_tiny import Model, kimi_k3_tiny, kimi_linear_tiny, random_weights

pytestmark = pytest.mark.usefixtures("double_precision")

CASES = {
    "kimi-linear": kimi_linear_tiny(),
    "kimi-linear grouped, q_lora": kimi_linear_tiny(groups=4, topk_group=2, q_lora=24, topk=3),
    "kimi-k3": kimi_k3_tiny(),
    "kimi-k3 block 4, two dense": kimi_k3_tiny(
        layers=10, kda_layers=(1, 2, 3, 5, 6, 7, 9), full_layers=(4, 8, 10), res_block=4, first_dense=2
    ),
    "kimi-k3 one block": kimi_k3_tiny(layers=7, kda_layers=(1, 2, 3, 5, 6), full_layers=(4, 7), res_block=12),
}


@pytest.fixture(params=CASES)
def pair(request):
    config = CASES[request.param]
    weights = {name: t.double() for name, t in random_weights(config, 3).items()}
    ids = torch.randint(0, config.vocab, (45,), generator=torch.Generator().manual_seed(1))
    reference = Model(config, weights, dtype=torch.float64)
    return config, weights, ids.tolist(), reference.step(ids, reference.new_state()), 1e-9


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    assert (got - want).abs().max() < bound


def test_prefill(pair):
    config, weights, ids, want, bound = pair
    (got,) = Session(engine_model(config, weights)).step((0, ids))
    close(got, want, bound)


def test_every_split_point_continued_by_prefill(pair):
    config, weights, ids, want, bound = pair
    model = engine_model(config, weights)
    for split in range(1, len(ids)):
        session = Session(model)
        (head,), (tail,) = session.step((2, ids[:split])), session.step((2, ids[split:]))
        close(torch.cat([head, tail]), want, bound)


def test_decode_after_prefill(pair):
    config, weights, ids, want, bound = pair
    session = Session(engine_model(config, weights))
    parts = session.step((1, ids[:19]))
    for token in ids[19:]:
        parts += session.step((1, [token]), decodes=1)
    close(torch.cat(parts), want, bound)


def test_decode_from_the_first_token(pair):
    config, weights, ids, want, bound = pair
    session = Session(engine_model(config, weights))
    close(torch.cat([session.step((0, [t]), decodes=1)[0] for t in ids]), want, bound)


def test_mixed_batch_equals_each_sequence_alone(pair):
    config, weights, ids, want, bound = pair
    session = Session(engine_model(config, weights))
    other = [(7 * t + 3) % config.vocab for t in ids]
    reference = Model(config, weights, dtype=torch.float64)
    want_other = reference.step(torch.tensor(other), reference.new_state())
    # sequence 0 decodes while 1 and 2 are prefilled in chunks of 1, 2 and more tokens
    got = {0: session.step((0, ids[:20])), 1: [], 2: []}
    cuts = {1: [0, 1, 3, 30, 44], 2: [0, 2, 3, 40, 45]}
    for step in range(4):
        segments = [(0, [ids[20 + step]])]
        segments += [(1, ids[cuts[1][step] : cuts[1][step + 1]]), (2, other[cuts[2][step] : cuts[2][step + 1]])]
        for s, logits in enumerate(session.step(*segments, decodes=1)):
            got[s].append(logits)
    close(torch.cat(got[0]), want[:24], bound)
    close(torch.cat(got[1]), want[:44], bound)
    close(torch.cat(got[2]), want_other, bound)
