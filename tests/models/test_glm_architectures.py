"""The presets have the published sizes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ftk.models import build_model, model_config
from ftk.registry import ARCHITECTURES

# layers, hidden size, heads, positions, padded vocabulary, parameters in millions
PUBLISHED = {
    "glm_tiny": (4, 64, 4, 512, 30592, 2),
    "glm_base": (12, 768, 12, 512, 30592, 109),
    "glm_large": (24, 1024, 16, 512, 30592, 335),
    "glm_large_chinese": (24, 1024, 16, 1024, 50048, 356),
    "glm_roberta_large": (24, 1024, 16, 512, 50304, 355),
    "glm_410m": (30, 1024, 16, 512, 30592, 410),
    "glm_515m": (30, 1152, 18, 512, 30592, 515),
    "glm_2b": (36, 2048, 32, 1024, 50304, 1920),
    "glm_10b": (48, 4096, 64, 1024, 50304, 9880),
    "glm_10b_chinese": (48, 4096, 64, 1024, 50048, 9879),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_architecture_has_the_published_size(name: str) -> None:
    layers, hidden_size, heads, positions, vocab_size, millions = PUBLISHED[name]
    with torch.device("meta"):
        model = build_model(name)
    config = model.config
    assert (config.num_layers, config.hidden_size, config.num_attention_heads) == (layers, hidden_size, heads)
    assert (config.max_positions, config.vocab_size, config.block_positions) == (positions, vocab_size, True)
    assert config.inner_size == 4 * hidden_size
    assert (config.embedding_dropout, config.attention_dropout, config.dropout) == (0.1, 0.1, 0.1)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02, abs=0.5)


def test_every_registered_glm_architecture_stands_in_the_table() -> None:
    registered = {name for name in ARCHITECTURES.names() if ARCHITECTURES.get(name).model == "glm"}
    assert registered == PUBLISHED.keys()


def test_a_preset_is_made_anew_each_time() -> None:
    _, config = model_config("glm_base")
    config.num_layers = 1
    assert model_config("glm_base")[1].num_layers == 12


def test_names_and_options_of_models_and_criterions_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from ftk.models import model_config\n"
        "from ftk.registry import CRITERIONS, MODELS\n"
        "model_config('glm_large'); MODELS.get('glm')\n"
        "[CRITERIONS.get(name) for name in ('cross_entropy',)]\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
