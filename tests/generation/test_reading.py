"""Frames of any lengths are read one behind the other: nothing is padding."""

from __future__ import annotations

from ftk.tasks.glm_blank import BlankGenerator
from tests.generation.slow import SPECIAL, small_model


def test_rows_in_flight_read_no_padding(monkeypatch):
    model = small_model()
    shapes, embed = [], model.embed

    def watched(tokens, **inputs):
        shapes.append(tuple(tokens.shape))
        return embed(tokens, **inputs)

    monkeypatch.setattr(model, "embed", watched)
    contexts = [[7, 3, 8], [9] * 39 + [3], [10, 3], [11] * 37 + [3]]
    BlankGenerator(model, SPECIAL, max_len=5, batch_size=4).fill_ids(contexts)
    assert shapes[0] == (1, 4 + 41 + 3 + 39)
