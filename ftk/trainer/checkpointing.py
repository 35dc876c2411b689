"""Which checkpoints a run writes, keeps and continues from; `ftk.checkpoint` knows how one is written."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from torch import nn

from ftk.checkpoint import (
    BEST,
    LAST,
    checkpoint_name,
    clean_leftovers,
    is_checkpoint,
    load_model_state,
    load_optimizer_state,
    newest_whole_checkpoint,
    numbered_checkpoints,
    point_to,
    read_config,
    read_trainer_state,
    remove_checkpoint,
    resolve_checkpoint,
    save_checkpoint,
    verify,
)
from ftk.errors import UserError
from ftk.trainer.config import CheckpointConfig
from ftk.trainer.state import TrainerState

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = ".lock"
LOCK_WAIT_SECONDS = 12.0  # data workers of a run that was killed hold its lock until they notice, some seconds later


class Checkpoints:
    """The checkpoints of one run.

    Args:
        config: where, how often, which are kept.
        run_config: the resolved configuration as a plain tree, for the run's folder and each checkpoint.
        tokenizer_folder: copied into each checkpoint.

    Raises:
        UserError: `save_dir` cannot be a folder.
    """

    def __init__(self, config: CheckpointConfig, run_config: dict[str, Any], tokenizer_folder: Path | None) -> None:
        self.config = config
        self.run_config = run_config
        self.tokenizer_folder = tokenizer_folder
        self.folder = Path(config.save_dir)
        self.last_saved: int | None = None  # number of updates of the newest checkpoint on disk
        self._lock: IO[str] | None = None  # held while this run trains

    def prepare_folder(self) -> None:
        """Make the run's folder with its `config.yaml`.

        Called once the run is known to begin or to go on, so that a refused one changes nothing.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"--save-dir {self.folder}: a file is in the way; name a folder") from error
        except PermissionError as error:
            raise UserError(f"--save-dir {self.folder}: no permission to write there") from error
        self._claim()
        temporary = self.folder / "config.yaml.tmp"
        temporary.write_text(yaml.safe_dump(self.run_config, sort_keys=False, allow_unicode=True), encoding="utf-8")
        os.replace(temporary, self.folder / "config.yaml")

    def _claim(self) -> None:
        """Keep other processes from training in this folder; the system forgets the claim when this one ends.

        Raises:
            UserError: another process trains in it.
        """
        if self._lock is not None or fcntl is None:
            return
        lock = open(self.folder / LOCK, "w")  # noqa: SIM115
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                lock.close()
                raise UserError(
                    f"--save-dir {self.folder}: another ftk-train is running in it; name another folder"
                ) from error
            except OSError as error:  # a file system without locks
                logger.warning("%s: cannot be locked (%s); do not train in it twice", self.folder, error.strerror)
            break
        self._lock = lock

    def release(self) -> None:
        """Let others train in this folder."""
        if self._lock is not None:
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing is not enough: data workers have inherited the file
            self._lock.close()
            self._lock = None

    def find(self) -> Path | None:
        """The whole checkpoint that this run continues from, None if it begins anew.

        It is `checkpoint_last` of the run's folder, the newest whole one if that is damaged, and what
        `restore_from` names if the folder holds none.

        Raises:
            BrokenCheckpoint: there are checkpoints and none is whole.
        """
        if self.folder.is_dir():
            self._claim()
            clean_leftovers(self.folder)  # what a killed process left half-written
        last = self.folder / LAST
        if is_checkpoint(last) and not verify(last):
            return last.resolve()
        if last.is_symlink():
            logger.warning("%s is not whole; looking for the newest checkpoint that is", last)
        newest = newest_whole_checkpoint(self.folder)
        if newest is None and self.config.restore_from is not None:
            return resolve_checkpoint(self.config.restore_from)
        return newest

    def load(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, tokenizer: str | None
    ) -> TrainerState:
        """Fill model and optimizer from a checkpoint and return where its run stood.

        A checkpoint that holds only weights (a converted or averaged one) gives the state of a new run.

        Args:
            folder: what `find` returned.
            model, optimizer: of this run.
            tokenizer: fingerprint of this run's tokenizer.

        Raises:
            UserError: the checkpoint was trained with another tokenizer, or does not fit the model.
        """
        logger.info("loading %s", folder)
        own = folder.parent == self.folder.resolve()
        values = read_trainer_state(folder)
        if values.get("tokenizer") not in (None, tokenizer):
            raise UserError(
                f"{folder} was trained with another tokenizer than the data's; take data made with "
                f"{folder / 'tokenizer'}, or another --save-dir"
            )
        load_model_state(folder, model, check_hashes=not own)
        if "num_updates" not in values or not (folder / "optimizer").is_dir():
            logger.info("took the weights of %s, which holds no more; a new run begins", folder)
            return TrainerState()
        load_optimizer_state(folder, model, optimizer, check_hashes=not own)
        state = TrainerState.from_dict(values, folder)
        if own:
            self.last_saved = state.num_updates
        else:  # the other run's checkpoints are not ours
            state.scores, state.best, state.validations_without_best = {}, None, 0
        for change in changes(read_config(folder), self.run_config):
            logger.info("changed since this checkpoint: %s", change)
        return state

    def save(self, state: TrainerState, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write a checkpoint, point `checkpoint_last` (`checkpoint_best` if it is) to it, prune the others.

        Raises:
            OSError: it could not be written (a full disk); older checkpoints are untouched.
        """
        if not self.config.save:
            return
        name = checkpoint_name(state.num_updates)
        known = {path.name for path in numbered_checkpoints(self.folder)} | {name}
        state.scores = {n: score for n, score in state.scores.items() if n in known}
        folder = save_checkpoint(
            self.folder / name,
            model=model,
            optimizer=optimizer,
            trainer_state=state.to_dict(),
            config=self.run_config,
            tokenizer_folder=self.tokenizer_folder,
        )
        self.last_saved = state.num_updates
        point_to(self.folder, LAST, folder)
        if state.best is not None and state.best.num_updates == state.num_updates:
            point_to(self.folder, BEST, folder)
        self._prune(state)

    def _prune(self, state: TrainerState) -> None:
        present = numbered_checkpoints(self.folder)  # newest first
        if self.config.keep_last == 0:
            return
        kept = {path.name for path in present[: self.config.keep_last]}
        kept |= {link.resolve().name for link in (self.folder / LAST, self.folder / BEST) if link.exists()}
        ranked = sorted(state.scores, key=state.scores.__getitem__, reverse=self.config.maximize_best_metric)
        kept |= set(ranked[: self.config.keep_best])
        every = self.config.keep_interval_updates
        for path in present:
            if path.name in kept or (every and int(path.name.rpartition("_")[2]) % every == 0):
                continue
            remove_checkpoint(path)
            logger.info("removed %s", path)


def changes(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[str]:
    """What differs between two trees of plain values, one line each: `training.max_update 100 -> 200`."""
    lines = []
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += changes(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key} {old} -> {new}")
    return lines
