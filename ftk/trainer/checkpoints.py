"""The checkpoints that a run writes, keeps and continues from; `ftk.checkpoint` writes and reads one."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftk.checkpoint import (
    BEST,
    LAST,
    BrokenCheckpoint,
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
    resolve_model,
    transfer_weights,
    verify,
)
from ftk.checkpoint.adapter import AdapterFiles, adapter_in
from ftk.checkpoint.background import Background
from ftk.checkpoint.finite import non_finite
from ftk.checkpoint.inspect import size_text
from ftk.checkpoint.layout import OPTIMIZER
from ftk.checkpoint.manifest import Abandoned
from ftk.checkpoint.naming import model_tensors, optimizer_state
from ftk.checkpoint.save import write_snapshot
from ftk.checkpoint.shared import check_shared
from ftk.checkpoint.snapshot import Buffers, ExtraTensors, Snapshot, take_snapshot
from ftk.checkpoint.transfer import has_rows_behind
from ftk.checkpoint.weights import has_tokenizer, tokenizer_of
from ftk.config import dump
from ftk.config.build import as_mapping
from ftk.errors import Diverged, UserError
from ftk.model_parallel.collective import collective, on_main
from ftk.model_parallel.shards import canonical_name, local
from ftk.model_parallel.world import World
from ftk.modules.adapters.adapt import init_from_weights
from ftk.tasks.base import Task
from ftk.trainer.config import TrainConfig
from ftk.trainer.resume import check_changes
from ftk.trainer.run_folder import RunFolder, SavedStatus, best_of, stale
from ftk.trainer.state import TrainerState

logger = logging.getLogger(__name__)

_NAMES_SHOWN = 3


class NotFinite(Diverged):
    """The state to save holds NaN or infinity; raised on every rank of a run at the same time."""


class Checkpoints:
    """The checkpoints of one run.

    All ranks call the same methods at the same steps. Each saves its shards; the main rank does everything else in the
    run's folder.

    Args:
        run: the configuration, saved in the run's folder and in each checkpoint.
        tokenizer_folder: copied into each checkpoint.
        world: the ranks of the run; None: this process alone.
    """

    def __init__(self, run: TrainConfig, tokenizer_folder: Path | None, world: World | None = None) -> None:
        self.world = world or World.single()
        self._writers = self.world.with_own_host_group()  # the same ranks, for the thread that writes
        self.run = run
        self.config = config = run.checkpoint
        self.run_config = dump(run)
        self.tokenizer_folder = tokenizer_folder
        self.folder = Path(config.save_dir)
        self.further_sections: dict[str, Any] = {}  # of config.yaml, in checkpoints alone
        self.adapter_files: AdapterFiles | None = None  # of a model with an adapter
        self.last_saved: int | None = None  # number of updates of the newest checkpoint on disk
        self.failure: str | None = None  # why the newest save failed; None if it did not
        self._background: Background[int] = Background(threaded=config.async_save)
        self._buffers = Buffers()
        self._newest_save = (self.folder, 0)  # its folder and bytes
        self._closing = False  # no further save will come
        self._continued: tuple[Path, SavedStatus] | None = None  # the run's own checkpoint that was loaded
        self._damaged: set[str] = set()  # names of damaged checkpoints, which do not count as kept ones
        self._run_folder = RunFolder(self.folder)

    def prepare_folder(self) -> None:
        """Make the run's folder with its `config.yaml`; of a run that goes on, complete what its last save began.

        Called when everything else is built, so that a refused run changes nothing.

        Raises:
            UserError: `save_dir` cannot be a folder, another process trains in it, or a rank does not see it.
        """
        on_main(self.world, lambda: self._run_folder.prepare(self.run_config))
        if not self.config.save:
            return
        check_shared(self.folder, self.world)
        if (continued := self._continued) is not None:
            # A process that was killed behind the rename may not have come to the links. No further save may come, as
            # none does in a run that is at its end.
            on_main(self.world, lambda: self._tidy(*continued))

    def release(self) -> None:
        """Wait for a running save, and unlock the folder."""
        self._closing = True
        self.collect(wait=True)
        self._run_folder.release()

    def find(self) -> Path | None:
        """The checkpoint that this run continues from, None for a new run.

        It is `checkpoint_last` of the run's folder; if that is damaged, the newest undamaged one; if the folder holds
        none, the one that `restore_from` names.

        Raises:
            BrokenCheckpoint: there are checkpoints and all are damaged.
        """
        last = on_main(self.world, self._last)
        found = None if last is None else Path(last)
        if found is not None and self._problems(found):
            logger.warning("%s is incomplete or damaged; looking for the newest whole checkpoint", self.folder / LAST)
            found = None
        if found is None:
            found = newest_whole_checkpoint(self.folder, world=self.world, check=self._problems)
            if found is not None:
                present = on_main(self.world, lambda: [path.name for path in numbered_checkpoints(self.folder)])
                self._damaged = set(present[: present.index(found.name)])  # newest first
        if found is None:
            source = self.config.restore_from
            return None if source is None else Path(on_main(self.world, lambda: str(resolve_checkpoint(source))))
        for flag in ("restore_from", "finetune_from"):
            if (other := getattr(self.config, flag)) is not None:
                logger.info("%s holds %s: `%s` %s is not used", self.folder, found.name, flag, other)
        return found

    def _problems(self, folder: Path) -> list[str]:
        """Why a run cannot continue from a checkpoint: damaged files, or fields that its state lacks."""

        def missing() -> list[str]:
            try:
                _state_in(folder, read_trainer_state(folder))
            except BrokenCheckpoint as error:
                return [str(error).removeprefix(f"{folder}: ")]
            return []

        return verify(folder, world=self.world) or on_main(self.world, missing)

    def _last(self) -> str | None:
        """The target of the link `checkpoint_last`, if it exists."""
        if self.folder.is_dir():
            self._run_folder.claim()
            clean_leftovers(self.folder)
        last = self.folder / LAST
        return str(last.resolve()) if is_checkpoint(last) or last.is_symlink() else None

    def load(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        tokenizer: str | None,
        data: str | None = None,
    ) -> TrainerState:
        """Fill model and optimizer from a checkpoint and return the state of its run.

        A checkpoint that holds only weights (a converted or averaged one) gives the state of a new run. Parts that the
        options reset (`reset_optimizer` ...) are not loaded, and empty in the state.

        Args:
            folder: from `find`.
            tokenizer: fingerprint of this run's tokenizer.
            data: `data_identity` of this run's training split.

        Raises:
            UserError: the checkpoint was trained with another tokenizer, does not fit the model, or was made with
                options that this run changes without a reset.
        """
        logger.info("loading %s", folder)
        own = folder.parent == self.folder.resolve()
        resets, state = collective(self.world, lambda: self._read_state(folder, tokenizer, data, own=own))
        load_model_state(folder, model, check_hashes=not own, world=self.world)
        if state is None:
            self._load_moments(folder, model, optimizer)
            return TrainerState()
        if "optimizer" not in resets:
            load_optimizer_state(folder, model, optimizer, check_hashes=not own, world=self.world)
        state.reset(resets if own else resets | {"scores"})  # scores of another run's checkpoints
        if own:
            self.last_saved = state.num_updates
            self._continued = folder, _status(state)
        return state

    def _read_state(
        self, folder: Path, tokenizer: str | None, data: str | None, *, own: bool
    ) -> tuple[set[str], TrainerState | None]:
        """The parts of a checkpoint to reset, and the state of its run; None if it holds only weights."""
        values = read_trainer_state(folder)
        if values.get("tokenizer") not in (None, tokenizer):
            held, asked = (_what_is_trained(config) for config in (read_config(folder), self.run_config))
            if own and held != asked:
                raise UserError(
                    f"{self.folder} holds a {held[0]} of task {held[1]}, and {asked[0]} of {asked[1]} is asked for; "
                    "choose another `save_dir`"
                )
            raise UserError(
                f"{folder} was trained with another tokenizer than the data's; take data made with "
                f"{folder / 'tokenizer'}, or another `save_dir`"
            )
        state, before = _state_in(folder, values), read_config(folder)
        if state is None:
            if self.adapter_files is not None and adapter_in(before) is None:
                raise UserError(f"{folder} has no adapter; give it as `finetune_from` to train one beside its weights")
            return set(), None
        resets = check_changes(
            self.run,
            before,
            folder,
            own=own,
            data_before=state.data,
            data=data,
            processes_before=state.data_processes,
            processes=self.world.sizes.data,
        )
        return set(resets), state

    def _load_moments(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load the optimizer's state of a converted checkpoint, if this run's optimizer can use it."""
        adam = isinstance(optimizer, torch.optim.Adam)  # AdamW is one
        if (folder / "optimizer").is_dir() and adam and not self.config.reset_optimizer:
            load_optimizer_state(folder, model, optimizer, world=self.world)
            logger.info("loaded weights and Adam's moments of %s; a new run starts", folder)
        else:
            logger.info("loaded only the weights of %s; a new run starts", folder)

    def load_initial_weights(self, model: nn.Module, task: Task) -> None:
        """Fill the model of a new run from `finetune_from`, if that is given.

        Raises:
            UserError: the weights do not fit, or belong to another tokenizer.
        """
        options = self.config
        if options.finetune_from is None:
            return
        common = options.finetune_vocabulary == "common"
        folder = collective(self.world, lambda: self._finetune_source(task))
        note = collective(self.world, lambda: _longer_texts(folder, self.run.model.config))
        parts = () if self.adapter_files is None else self.adapter_files.adapter.PARTS
        transfer = transfer_weights(
            folder, model, skip=options.finetune_skip, common_rows=common, parts=parts, world=self.world
        )
        if transfer.new:
            init_from_weights(model)
        logger.info("a new run starts with %d tensors of %s", len(transfer.taken), folder)
        if note is not None:
            logger.info("%s", note)
        if transfer.copied:
            logger.info("%s start as copies of %s", ", ".join(transfer.copied), ", ".join(transfer.copied.values()))
        if transfer.fresh:
            logger.info("%s: not in %s, they keep initial values", ", ".join(transfer.fresh), folder)
        for name, (taken, rows) in transfer.rows.items():
            logger.info("%s: %d of %d rows are loaded, the others keep initial values", name, taken, rows)
        if transfer.replaced:
            logger.info("%s: not loaded, the classifier stands in their place", ", ".join(transfer.replaced))
        for names, what in ((transfer.skipped, "keep initial values"), (transfer.unused, "are not loaded")):
            if names:
                logger.info("%s %s (`finetune_skip`)", ", ".join(names), what)

    def _finetune_source(self, task: Task) -> Path:
        """The checkpoint that `finetune_from` names."""
        assert self.config.finetune_from is not None
        folder = resolve_model(self.config.finetune_from)
        common = self.config.finetune_vocabulary == "common"
        if not _is_tokenizer_of(folder, task):
            if not common:
                grown = f"start from what ftk-checkpoint grow {folder} DST writes"
                way = grown if has_rows_behind(self.run.model) else "give `finetune_vocabulary` common"
                way = f"if yours only adds tokens to it, {way}"
                its = as_mapping("model", read_config(folder).get("model")).get("_name")
                if its not in (None, self.run.model.name):  # then neither helps
                    way = f"and it holds a {its}, and no {self.run.model.name}; leave out `arch`"
                raise UserError(
                    f"`finetune_from` {folder} was trained with another tokenizer than the data's, so its embeddings "
                    f"are of other tokens; {way}"
                )
            logger.warning("%s has another tokenizer; row N of its embeddings is loaded for token N of yours", folder)
        return folder

    def save(
        self,
        state: TrainerState,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra_tensors: ExtraTensors | None = None,
    ) -> None:
        """Start to save a checkpoint; it is written on return if `async_save` is off.

        Waits for a running save and copies the state. Another thread then writes and renames the checkpoint, moves
        `checkpoint_last` (and `checkpoint_best`) to it and removes old checkpoints.

        Args:
            state, model, optimizer: of the run; checkpoints that no longer exist are removed from `state.scores`.
            extra_tensors: as of `take_snapshot`.

        Raises:
            NotFinite: weights, their average or the optimizer's state hold NaN or infinity; nothing is written. Also
                raised with `save` off.
        """
        self.collect(wait=True)
        tensors = {
            "model": model_tensors(model)[0],
            "optimizer": optimizer_state(model, optimizer)[0],
            **(extra_tensors or {}),
        }
        self._refuse_non_finite(tensors, model, state.num_updates)
        if not self.config.save:
            return
        name = checkpoint_name(state.num_updates)
        known = {path.name for path in numbered_checkpoints(self.folder)} | {name}
        state.scores = {n: score for n, score in state.scores.items() if n in known}
        snapshot = take_snapshot(
            model=model,
            optimizer=optimizer,
            trainer_state=state.to_dict(),
            config=self.run_config | self.further_sections,
            adapter_files=self.adapter_files,
            tokenizer_folder=self.tokenizer_folder,
            extra_tensors=extra_tensors,
            buffers=self._buffers if self.config.async_save else None,
            world=self.world,
        )
        status = _status(state)
        self._newest_save = (self.folder / name, snapshot.num_bytes)
        self._background.start(lambda: self._write(snapshot, status))
        if not self.config.async_save:
            self.collect(wait=True)

    def _refuse_non_finite(self, parts: ExtraTensors, model: nn.Module, num_updates: int) -> None:
        """Raise `NotFinite` if a tensor of any rank is not finite; the host waits once for the device."""
        buffers = {canonical_name(name, model) for name, _ in model.named_buffers()}
        own = {f"{part} {name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        for name in (f"model {buffer}" for buffer in buffers):
            if name in own and own[name].is_floating_point():  # infinity may be a mask
                own[name] = local(own[name]).nan_to_num(nan=math.nan, posinf=0.0, neginf=0.0)
        gathered = self.world.gather_json(non_finite(own)[: _NAMES_SHOWN + 1])
        names = list(dict.fromkeys(name for names in gathered for name in names))
        if not names:
            return
        where = ", ".join(names[:_NAMES_SHOWN]) + (" and others" if len(names) > _NAMES_SHOWN else "")
        way = "start again with a lower `lr`"
        if self.last_saved is not None:
            last = self.folder / checkpoint_name(self.last_saved)
            way = f"the same command with a lower `lr` and `reset_lr_scheduler` continues from {last}, which is finite"
        raise NotFinite(f"after update {num_updates} there is NaN or infinity in {where}; it is not saved; {way}")

    def collect(self, *, wait: bool) -> None:
        """Note the result of the newest save, if it has ended: in `last_saved`, or in `failure`.

        A full disk or an I/O error is logged as a warning, and training continues.

        Args:
            wait: whether to wait for a running save.

        Raises:
            Exception: the save failed for another reason.
        """
        try:
            num_updates = self._background.collect(wait=wait)
        except OSError as error:
            self.failure = self._describe_failure(error)
            older = "" if self.last_saved is None else "; older checkpoints stay"
            retry = "" if self._closing else "; training continues, and the next save tries again"
            logger.warning("%s%s%s", self.failure, older, retry)
            return
        if num_updates is not None:
            self.failure = None
            self.last_saved = num_updates

    def abandon(self) -> None:
        """Stop a running save and remove its files, unless it ends first."""
        self._background.abandon()
        try:
            self.collect(wait=True)
        except Abandoned:
            logger.warning("%s was being written; this save is stopped, its files are removed", self._newest_save[0])

    def _write(self, snapshot: Snapshot, status: SavedStatus) -> int:
        """Write a checkpoint, then move the links and remove old ones; runs in the background thread."""
        folder = write_snapshot(self.folder / checkpoint_name(status.num_updates), snapshot, world=self._writers)
        on_main(self._writers, lambda: self._tidy(folder, status))
        return status.num_updates

    def _tidy(self, folder: Path, status: SavedStatus) -> None:
        """Move the links to the new checkpoint and the best one, and remove checkpoints that are not to be kept."""
        point_to(self.folder, LAST, folder)
        best = best_of(self.folder, status, self.config)
        if best is not None:
            point_to(self.folder, BEST, best)
        self._damaged.discard(folder.name)
        present = [path for path in numbered_checkpoints(self.folder) if path.name not in self._damaged]
        for path in stale(self.folder, present, status, self.config):
            try:
                remove_checkpoint(path)
                logger.info("removed %s", path)
            except OSError as error:
                logger.warning("%s could not be removed: %s", path, error.strerror)

    def _describe_failure(self, error: OSError) -> str:
        folder, needed = self._newest_save
        text = f"{folder} could not be saved: {error.strerror} (it needs {size_text(needed)}"
        try:
            return f"{text}, {size_text(shutil.disk_usage(self.folder).free)} are free)"
        except OSError:
            return f"{text})"


def _status(state: TrainerState) -> SavedStatus:
    best = state.best.num_updates if state.best is not None else None
    return SavedStatus(state.num_updates, best, dict(state.scores))


def _longer_texts(folder: Path, config: Any) -> str | None:
    """What to know where a model reads longer texts than that of `finetune_from`; None: it does not."""
    before = (read_config(folder).get("model") or {}).get("max_positions")
    now = getattr(config, "max_positions", None)
    if not isinstance(before, int) or now is None or now <= before:
        return None
    scaling = getattr(config, "rope_scaling", None)
    if scaling in ("llama3", "yarn") and config.rope_original_positions is None:
        raise UserError(
            f"`max_positions` {now} changes `rope_scaling` {scaling} of {folder}, which was for {before}; give "
            f"`rope_original_positions` {before} to keep it"
        )
    how = "; `rope_scaling` stretches its rotary positions" if scaling == "none" else ""
    return f"`max_positions` is {now}, that of {folder} {before}: longer texts are new to the model{how}"


def _is_tokenizer_of(folder: Path, task: Task) -> bool:
    """Whether a task has the tokenizer of a checkpoint or of another program's folder, as far as that says it.

    Converted weights have no fingerprint of it, but its files; the same vocabulary may be read by another of ftk's
    tokenizers, of which the number of tokens decides.
    """
    recorded = read_trainer_state(folder).get("tokenizer")
    if recorded is None and has_tokenizer(folder):
        its, own = task.add_special_tokens(tokenizer_of(folder)), task.tokenizer
        return its.fingerprint == own.fingerprint or (its.name != own.name and its.vocab_size == own.vocab_size)
    return recorded in (None, task.tokenizer.fingerprint)


def _state_in(folder: Path, values: dict[str, Any]) -> TrainerState | None:
    """The state of a checkpoint's run; None if it holds only weights."""
    if not (folder / OPTIMIZER).is_dir() or not TrainerState.is_in(values):
        return None
    return TrainerState.from_dict(values, folder)


def _what_is_trained(config: Mapping[str, Any]) -> tuple[str, str]:
    """The architecture, or else the model, and the task of a run's configuration."""
    model, task = (as_mapping(key, config.get(key)) for key in ("model", "task"))
    return str(model.get("arch") or model.get("_name")), str(task.get("_name"))
