"""Forms of attention and loss are no part of what a run is: they may change when it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftk.checkpoint import load_model_tensors, read_config
from ftk.config.changes import FREE, find_changes
from tests.trainer.test_glm_runs import glm_trainer

NO_DROPOUT = {"model__dropout": 0.0, "model__attention_dropout": 0.0, "model__embedding_dropout": 0.0}


@pytest.mark.parametrize("forms", [("eager", "chunked", 3), ("sdpa", "chunked", 1000), ("auto", "auto", 1024)])
def test_a_run_goes_on_in_another_form(data_bin: Path, tmp_path: Path, forms: tuple[str, str, int]) -> None:
    results = []
    for name, (attention, loss_form, chunk) in {"same": ("sdpa", "plain", 1024), "other": forms}.items():
        folder = tmp_path / name
        glm_trainer(
            data_bin,
            folder,
            training__max_update=2,
            model__attention="sdpa",
            criterion__loss_form="plain",
            **NO_DROPOUT,
        ).train()
        trainer = glm_trainer(
            data_bin,
            folder,
            training__max_update=4,
            model__attention=attention,
            criterion__loss_form=loss_form,
            criterion__loss_chunk_tokens=chunk,
            **NO_DROPOUT,
        )
        changes = find_changes(read_config(folder / "checkpoint_last"), trainer.run.config)
        assert {change.resume for change in changes} == {FREE}
        assert trainer.state.num_updates == 2
        trainer.train()
        results.append(load_model_tensors(folder / "checkpoint_last"))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
