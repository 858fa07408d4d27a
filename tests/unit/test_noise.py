"""The noise of a request: its own stream, by its seed, and a fair draw."""

import torch

from agent_vllm.engines.sampling_noise import draw_noise, noise_stream

CPU = torch.device("cpu")


def rows_of(seed, num_rows, width=6):
    stream = noise_stream(seed, CPU)
    return draw_noise([stream] * num_rows, width, CPU)


def test_a_seed_gives_one_stream_and_its_rows_differ():
    assert rows_of(3, 4).tolist() == rows_of(3, 4).tolist()
    assert len({tuple(row) for seed in (3, 4) for row in rows_of(seed, 4).tolist()}) == 8


def test_any_int_is_a_seed_as_in_torch():
    assert rows_of(-1, 1).tolist() == rows_of(2**64 - 1, 1).tolist()


def test_tokens_are_drawn_as_often_as_they_are_likely():
    likely = torch.tensor([0.5, 0.25, 0.2, 0.05, 0.0, 1e-9])
    chosen = (likely / rows_of(0, 40_000)).argmax(-1)
    shares = torch.bincount(chosen, minlength=6) / len(chosen)
    assert (shares - likely).abs().max() < 0.01, shares
    assert shares[4:].tolist() == [0.0, 0.0]


def test_no_draw_is_zero():
    """A token of probability 0 would win with it."""
    assert rows_of(0, 1, 20_000_000).min() > 0


def test_rows_have_streams_of_their_own_or_no_noise():
    streams = [noise_stream(3, CPU), None, noise_stream(4, CPU)]
    rows = draw_noise(streams, 6, CPU)
    assert rows.dtype == torch.float32
    assert rows.tolist() == [rows_of(3, 1)[0].tolist(), [1.0] * 6, rows_of(4, 1)[0].tolist()]
