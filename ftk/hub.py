"""Trained models from disk in one line: model, tokenizer, generator."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftk.config import Chosen, slot
from ftk.config.build import as_mapping, build
from ftk.errors import UserError, download_hint
from ftk.plugins import import_plugins, naming_plugin
from ftk.registry import ARCHITECTURES, MODELS, is_plugin, named

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ftk.generation.config import GenerationConfig
    from ftk.generation.processors.prefix import AllowedTokensFunction
    from ftk.generation.text import TextGenerator
    from ftk.model_parallel.world import World
    from ftk.tasks.base import Task
    from ftk.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _ModelSection:
    """The part of config.yaml that is needed to build the model."""

    model: Chosen = slot(MODELS, flag="--arch", architectures=ARCHITECTURES)


def load_model(
    path: str | Path,
    device: str | torch.device = "auto",
    *,
    base: str | Path | None = None,
    ema: bool = False,
    dtype: torch.dtype | None = None,
    user_dir: str | Path | None = None,
    world: World | None = None,
) -> nn.Module:
    """The model of a checkpoint, in evaluation mode.

    Args:
        path: a checkpoint folder, a run's folder (its best checkpoint, else its last), or a Hugging Face folder of a
            family that ftk has (config.json and weights), which is read as it is.
        device: where to put it: "auto" (a GPU if there is one), or as for `torch.device`.
        base: where `path` is the folder of an adapter alone, ftk's or peft's: what `path` would be for the model that
            it was trained beside. Weights that are not those are refused, where the folder says which they were. A
            generator is then of the adapter's task, where the folder says that.
        ema: with the moving average of its weights, which training kept with them (`ema_decay`).
        dtype: of its weights and of what is computed, e.g. torch.bfloat16; float32 if None, whatever they were saved
            in. Weights in int8 or int4 stay what they are.
        user_dir: the plugin that registers the model, where it is none of ftk's. A plugin that a checkpoint names is
            never imported by itself.
        world: processes that share the model (`ftk.model_parallel.world.open_world`), each loading its part, and those
            of a data rank making the same calls; its device is taken. None: this one alone.

    Raises:
        UserError: no checkpoint there, its model is unknown, or `ema` and it has no average; a model that the
            processes cannot share; a dtype that is no floating point type; an adapter that does not fit `base`.
        BrokenCheckpoint: a file of it is damaged.
    """
    from ftk.checkpoint import load_model_state, read_config, resolve_model
    from ftk.checkpoint.adapted_model import AdaptedModel
    from ftk.checkpoint.adapter import adapter_in, read_adapter, refuse_adapted
    from ftk.checkpoint.bounded import bounded_by
    from ftk.checkpoint.head import head_in
    from ftk.checkpoint.quantize import prepare_for, refuse_quantized
    from ftk.checkpoint.weights import weights_of
    from ftk.model_parallel.world import resolve_device
    from ftk.modules.adapters.adapt import adapt, precompute
    from ftk.modules.adapters.p_tuning import refuse_stages
    from ftk.modules.classifier import replace_head
    from ftk.modules.few_rows_layer import prepare
    from ftk.modules.initialization import undrawn

    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise UserError(f"dtype is {dtype!r}; it must be a floating point type of torch, e.g. torch.bfloat16, or None")
    device = resolve_device(device)
    import_plugins(user_dir)
    folder = resolve_model(path if base is None else base)
    tree = read_config(folder)
    chosen, weights, shape = _chosen_model(tree), weights_of(folder), head_in(tree)
    if base is None:
        adapter = adapter_in(tree)
    else:
        refuse_adapted(folder, "another adapter")
        alone = read_adapter(path, AdaptedModel(chosen.name, chosen.config, shape, weights))
        adapter, weights = alone.adapter, alone.beside(weights, folder)

    def build_model() -> nn.Module:
        with bounded_by(weights.tensors, folder), undrawn():
            model: nn.Module = chosen.build()
            if shape is not None:
                replace_head(model, shape)
        prepare(model)
        prepare_for(tree, model)
        if adapter is not None:
            with bounded_by(weights.tensors, folder), undrawn():
                adapt(model, adapter)
        return model

    if world is not None and world.size > 1:
        from ftk.model_parallel.inference import distribute_for_inference

        refuse_quantized(folder, "sharing by several processes")
        refuse_stages(adapter, world.sizes.pipeline)

        def load(part: nn.Module) -> None:
            load_model_state(folder, part, ema=ema, world=world, weights=weights)
            precompute(part)

        return distribute_for_inference(build_model, world, load).to(dtype=dtype)
    model = build_model()
    load_model_state(folder, model, ema=ema, weights=weights)
    precompute(model)
    return model.to(device, dtype).eval()


def _chosen_model(tree: dict[str, Any]) -> Chosen:
    """The model that a checkpoint's configuration names, with its options; its plugins are imported already."""
    with naming_plugin(as_mapping("common", tree.get("common")).get("user_dir")):
        return build(_ModelSection, {"model": tree.get("model")}).model


def load_tokenizer(path: str | Path, *, user_dir: str | Path | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint, of a run, of a folder written by ftk-preprocess, or of a Hugging Face folder.

    Args:
        path: one of these folders.
        user_dir: the plugin that registers the tokenizer, where it is none of ftk's.

    Raises:
        UserError: there is none, or it is unknown.
    """
    from ftk.checkpoint import is_checkpoint, numbered_checkpoints, resolve_checkpoint, tokenizer_of

    import_plugins(user_dir)
    folder = Path(path)
    if not (folder / "tokenizer").is_dir() and not is_checkpoint(folder) and numbered_checkpoints(folder):
        folder = resolve_checkpoint(folder)
    return tokenizer_of(folder)


def load_generator(
    path: str | Path | Sequence[str | Path],
    device: str | torch.device = "auto",
    *,
    base: str | Path | None = None,
    ema: bool = False,
    dtype: torch.dtype | None = None,
    user_dir: str | Path | None = None,
    allowed_tokens: AllowedTokensFunction | None = None,
    world: World | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    **options: Any,
) -> TextGenerator[Any]:
    """A generator of texts with a checkpoint's model, as its task makes one: `generate` and `stream`, and more.

        generator = ftk.load_generator("run", beam=4)
        generator.generate("Once upon a time").text
        for piece in generator.stream("Once upon a time"): ...

    Args:
        path: as for `load_model`; the tokenizer stands beside the model. Several, in a list or in one text with
            colons between, are an ensemble: the mean of their probabilities.
        device: where the model runs, as for `load_model`.
        base: as for `load_model`, of the only model.
        ema: as for `load_model`.
        dtype: as for `load_model`, of all models.
        user_dir: the plugin that registers model or tokenizer, where they are none of ftk's.
        allowed_tokens: says which tokens may come next, see `ftk.generation.processors.prefix.AllowedTokens`.
        world: as for `load_model`; every process is given the same texts, and gets the same answers.
        adapters: name -> folder of a separate adapter for the model of `path`. A service chooses one for each
            request; in an engine it is `Request.adapter`. All are asked as the model of `path` is, whatever they were
            trained for.
        options: fields of the task's `GenerationConfig`, e.g. beam, max_len, sampling, top_p, seed, and of
            `ftk.generation.processors.ProcessorConfig`, e.g. forbid_words, prefix, constraints, stop. `lm_path` and
            `lm_weight` add a language model's log-probabilities; `lm_path` is of the same kind as `path`.

    Returns:
        the generator of the task (`Task.text_generator`).

    Raises:
        UserError: as `load_model`; the checkpoint has no tokenizer, or a task that does not generate; an unknown
            option; models with other tokenizers; answers of `max_len` tokens, which a model's positions do not reach;
            int8 weights on a GPU.
    """
    from ftk.checkpoint import read_config
    from ftk.checkpoint.weights import fingerprint
    from ftk.generation.config import check_names, checked_config
    from ftk.generation.engine.check import check_generator
    from ftk.generation.processors.steering import steering_of
    from ftk.tasks.answering.text_framing import TextFraming
    from ftk.tasks.sft.task import add_chat_framing, with_template_end

    import_plugins(user_dir)
    paths = checkpoint_paths(path)
    _check_paths(paths, base, adapters or {})
    folders = _resolved(paths if base is None else [base], device)
    folder = folders[0]
    chosen = _chosen_task(folder, None if base is None else paths[0])
    task: type[Task] = chosen.entry.target  # type: ignore[assignment]
    generator = task.text_generator()
    steered = {one.name: options.pop(one.name) for one in fields(task.processor_config) if one.name in options}
    lm_paths = [] if options.get("lm_path") is None else checkpoint_paths(options["lm_path"])
    if lm_paths:
        options["lm_path"] = ":".join(map(str, lm_paths))
    check_names(options, [one.name for part in (task.generation_config, task.processor_config) for one in fields(part)])
    config = checked_config(task.generation_config(), **options)
    model_config = _chosen_model(read_config(folder)).config
    if world is not None and world.sizes.pipeline > 1:
        _check_pipeline(generator, config, len(folders), model_config)
    tokenizer = load_tokenizer(folder, user_dir=user_dir)

    def framing_of(model_config: Any) -> Any:
        found = task.framing_as_trained(tokenizer, model_config, chosen.config)
        return found if found is None or isinstance(found, TextFraming) else with_template_end(found, tokenizer)

    try:
        framing = framing_of(model_config)
    except UserError:
        if base is not None:  # another model than the adapter's may have no such framing
            load_model(paths[0], "cpu", base=base)  # refuses other weights than the adapter was trained beside
        raise
    _check_framing(task, framing, folder, allowed_tokens)
    steering = None
    if generator.needs_framing:
        steering = steering_of(task.processor_config, tokenizer, framing, config, allowed_tokens, **steered)
    _check_tokenizers(folders[1:], folder, tokenizer, {tokenizer.fingerprint}, "an ensemble needs one tokenizer")
    _check_config(generator, config, folders)
    language_model = None
    if lm_paths:
        lm_folders = _resolved(lm_paths, device)
        _check_config(generator, config, lm_folders, "language model: ")
        fitting = {tokenizer.fingerprint, tokenizer.own_fingerprint}  # one that reads no sources needs none for them
        _check_tokenizers(lm_folders, folder, tokenizer, fitting, "a language model must have that of the model")
        language_model = _load_together(lm_folders, device, dtype=dtype, world=world)
    sources = folders if base is None else paths
    model = _load_together(sources, device, base=base, ema=ema, dtype=dtype, world=world)
    if adapters:
        _put_adapters(model, sources, adapters, world)
        _warn_of_other_tasks(adapters, folder, chosen)
    framing = framing_of(getattr(model, "config", None)) or framing
    loaded = generator.assembled(tokenizer, model, framing, config, steering, language_model)
    if generator.needs_framing and (world is None or world.size == 1):
        check_generator(loaded)
    add_chat_framing(loaded, model_config)
    loaded.digest = fingerprint(map(Path, [*folders, *sources, *(adapters or {}).values()]))
    return loaded


def _resolved(paths: Sequence[str | Path], device: str | torch.device) -> list[Path]:
    """The folders of checkpoints that a device can generate with; found once, as a run that saves changes its links."""
    from ftk.checkpoint import resolve_model
    from ftk.checkpoint.quantize import refuse_int8_on_a_gpu
    from ftk.model_parallel.world import resolve_device

    folders = [resolve_model(path) for path in paths]
    for folder in folders:
        refuse_int8_on_a_gpu(folder, resolve_device(device))
    return folders


def _check_framing(task: type[Task], framing: Any, folder: Path, allowed_tokens: Any) -> None:
    """Refuses a task that does not generate, and `allowed_tokens` where no tokens are generated one by one."""
    needs_framing = task.text_generator().needs_framing
    if not needs_framing and allowed_tokens is not None:
        raise UserError(f"{folder} was trained for {task.__name__}, which does not use 'allowed_tokens'; leave it out")
    if needs_framing and framing is None:
        way = ", or give the task a function 'framing'" if is_plugin(task) else ""
        raise UserError(f"{folder} was trained for {task.__name__}, which does not generate; use ftk.load_model{way}")


def _check_paths(paths: Sequence[str | Path], base: str | Path | None, adapters: Mapping[str, str | Path]) -> None:
    """Refuses paths that do not go together, and adapters that are none, before anything is loaded."""
    from ftk.checkpoint.layout import ADAPTER_CONFIG, is_adapter

    if adapters and base is not None:
        raise UserError("give the model as `path`, and all adapters as `adapters`; `base` is for one adapter alone")
    for name, one in adapters.items():
        if not is_adapter(Path(one)):
            from ftk.checkpoint.adapter import ADAPTER_ALONE

            what = f"is no adapter (no {ADAPTER_CONFIG})" if Path(one).is_dir() else "there is no such folder"
            raise UserError(f"`adapters` {name}={one}: {what}; {ADAPTER_ALONE}")
    if base is not None and len(paths) > 1:
        raise UserError("`base` is for one adapter; an ensemble is of whole models (ftk-checkpoint merge)")


def _warn_of_other_tasks(adapters: Mapping[str, str | Path], folder: Path, chosen: Chosen) -> None:
    """Warns of adapters that were trained for another task than the model, by whose task all are asked here."""
    for name, one in adapters.items():
        learned = _chosen_task(folder, one)
        its, own = ((task.entry.target, getattr(task.config, "template", None)) for task in (learned, chosen))
        if not (isinstance(its[0], type) and issubclass(its[0], own[0]) and its[1] == own[1]):  # type: ignore[arg-type]
            logger.warning(
                "adapter %s was trained for %s; beside others it is asked as the model is (%s). To ask it as it was "
                "trained, e.g. by its template, give %s as `path` with the model as its `base`, or in a service as one "
                "of `models`",
                name, learned.name, chosen.name, one,
            )  # fmt: skip


def task_of(folder: Path, adapter: str | Path | None = None) -> type[Task]:
    """The task that a checkpoint, or a separate adapter, was trained with, or that generates; its plugin is already
    imported."""
    return _chosen_task(folder, adapter).entry.target  # type: ignore[return-value]


def _chosen_task(folder: Path, adapter: str | Path | None = None) -> Chosen:
    """The task that generates, with its options: that of the training, or the model's usual one."""
    from ftk.checkpoint.adapter import config_beside
    from ftk.tasks.restore import RestoredTask

    tree = config_beside(folder, adapter)
    with naming_plugin(as_mapping("common", tree.get("common")).get("user_dir")):
        parts = build(RestoredTask, {key: as_mapping(key, tree.get(key)) for key in ("model", "task")})
        if getattr(parts.task.entry.target, "generates_as_usual", False):
            return build(RestoredTask, {"model": as_mapping("model", tree.get("model"))}).task
    return parts.task


def _check_tokenizers(
    others: Iterable[Path], folder: Path, tokenizer: Tokenizer, fitting: set[str], reason: str
) -> None:
    """Refuses checkpoints whose tokenizers have none of the fingerprints `fitting`; `tokenizer` is that of `folder`."""
    for other in others:
        its = load_tokenizer(other)
        if its.fingerprint not in fitting:
            raise UserError(
                f"{other} has another tokenizer ({its.described}) than {folder} ({tokenizer.described}); {reason}"
            )


def _check_config(generator: type[TextGenerator[Any]], config: Any, folders: Iterable[Path], whose: str = "") -> None:
    """Refuses answers that the positions of the models do not reach, before any weights are read."""
    from ftk.checkpoint import read_config

    for folder in folders:
        try:
            generator.check_config(config, _chosen_model(read_config(folder)).config)
        except UserError as error:
            raise UserError(f"{whose}{error}") from None


def _check_pipeline(
    generator: type[TextGenerator[Any]], config: GenerationConfig, num_models: int, model_config: Any
) -> None:
    """Refuses what wants hidden states, or several models, where each process has only some layers."""
    from ftk.generation.search import strategy
    from ftk.models.encoder_decoder.config import EncoderDecoderConfig

    if not generator.needs_framing:
        raise UserError("a model that writes no texts does not go with a pipeline; use `tensor_parallel_size` alone")
    for is_asked, what in (
        (isinstance(model_config, EncoderDecoderConfig), "an encoder-decoder that answers"),
        (num_models > 1, "an ensemble"),
        (config.lm_path is not None, "a language model (lm_path)"),
        (strategy(config).target.observer is not None, "a search that compares hidden states"),
    ):
        if is_asked:
            raise UserError(f"{what} does not go with a pipeline; use `tensor_parallel_size` alone")


def _load_together(
    folders: Sequence[str | Path],
    device: str | torch.device,
    *,
    base: str | Path | None = None,
    ema: bool = False,
    dtype: torch.dtype | None = None,
    world: World | None = None,
) -> nn.Module:
    """One model, or several as an ensemble."""
    from ftk.generation.ensemble import Ensemble
    from ftk.models.base import Backbone

    models = [load_model(folder, device, base=base, ema=ema, dtype=dtype, world=world) for folder in folders]
    for model in models:
        if is_plugin(model) and not isinstance(model, Backbone):
            raise UserError(
                f"{named(model)} cannot generate: it is no ftk.models.base.Backbone, whose layers take a cache"
            )
    return models[0] if len(models) == 1 else Ensemble(models)


def _put_adapters(
    model: nn.Module, folders: Sequence[str | Path], adapters: Mapping[str, str | Path], world: World | None
) -> None:
    """Reads adapters and puts them on their model, side by side.

    Raises:
        UserError: there is no one model of this process alone; as `load_model` and `put_side_by_side`.
    """
    from ftk.checkpoint import read_config, resolve_model
    from ftk.checkpoint.adapted_model import AdaptedModel
    from ftk.checkpoint.adapter import read_adapter
    from ftk.checkpoint.head import head_in
    from ftk.checkpoint.weights import weights_of
    from ftk.modules.adapters.side_by_side import put_side_by_side

    if len(folders) > 1 or (world is not None and world.size > 1):
        raise UserError("adapters side by side need one model, in one process")
    folder = resolve_model(folders[0])
    tree, weights, found = read_config(folder), weights_of(folder), {}
    chosen = _chosen_model(tree)
    base = AdaptedModel(chosen.name, chosen.config, head_in(tree), weights)
    for name, path in adapters.items():
        try:
            alone = read_adapter(path, base)
            alone.beside(weights, folder)  # checks that it fits
        except UserError as error:
            raise UserError(f"adapter {name}: {error}") from None
        found[name] = alone.adapter, alone.tensors
    put_side_by_side(model, found)


def checkpoint_paths(path: str | Path | Sequence[str | Path]) -> list[str | Path]:
    """The checkpoints that a path names: those between its colons, unless something of that very name exists."""
    if not isinstance(path, (str, Path)):
        parts = list(path)
    elif "://" in str(path):
        raise UserError(f"{path}: no such folder{download_hint(str(path), 'model')}")
    elif Path(path).exists() or ":" not in str(path):
        return [path]
    else:
        parts = [part for part in str(path).split(":") if part]
    if not parts:
        raise UserError(f"{path} names no checkpoint; give folders, with colons between for an ensemble")
    return parts
