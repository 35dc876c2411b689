"""What holds inside of evaluation mode, and is as before afterwards."""

from __future__ import annotations

import pytest
from torch import nn
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

from ftk.generation.engine.decoder import CachedDecoder
from ftk.modules.evaluation_mode import changing_shapes, evaluation_mode
from tests.generation import test_engine


@pytest.fixture(params=[True, False], ids=["cudnn on", "cudnn off"])
def before(request):
    given = cudnn_sdp_enabled()
    enable_cudnn_sdp(request.param)
    yield request.param
    enable_cudnn_sdp(given)


class Seen(nn.Module):
    def forward(self):
        return self.training, cudnn_sdp_enabled()


def test_a_model_evaluates_without_cudnn_attention(before):
    model = Seen()
    with evaluation_mode(model):
        assert model() == (False, False)
    assert model() == (True, before)


def test_it_is_as_before_once_the_last_has_left(before):
    first, second = changing_shapes(), changing_shapes()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # in another order than with `with`, as threads and generators do
    assert not cudnn_sdp_enabled()
    with pytest.raises(ZeroDivisionError), changing_shapes():
        raise ZeroDivisionError
    second.__exit__(None, None, None)
    assert cudnn_sdp_enabled() == before


def test_prompts_are_read_and_continued_without_it(before, monkeypatch):
    seen = []
    for name in ("read", "step"):
        method = getattr(CachedDecoder, name)

        def watched(self, *given, method=method):
            seen.append((method.__name__, cudnn_sdp_enabled()))
            return method(self, *given)

        monkeypatch.setattr(CachedDecoder, name, watched)
    engine = test_engine.engine(test_engine.causal_model())
    engine.submit(test_engine.request([7, 3, 8], max_len=3, min_len=3))
    while engine.is_busy:
        engine.step()
        assert cudnn_sdp_enabled() == before  # between two steps the caller has what it had
    assert seen == [("read", False), ("step", False), ("step", False)]
