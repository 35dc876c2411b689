"""Checks of what plugins give, once at the start, on one sample: a mistake is answered by what the contract asks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import math
from collections.abc import Mapping
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np

from ftk.batch import Batch
from ftk.data.batches.collate import Collater
from ftk.data.sample_dataset import SampleDataset
from ftk.errors import UserError
from ftk.plugins import naming_mistakes, refuse
from ftk.registry import ATTENTIONS, TASKS, attention_of_plugin, is_plugin, named
from ftk.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from torch import nn

    from ftk.config import Chosen
    from ftk.criterions.base import Criterion, LossOutput
    from ftk.data.corpora.corpus import Corpus
    from ftk.tasks.base import Task

_ARRAYS = {"tokens": "int64 [T]", "targets": "int64 [T]", "loss_mask": "bool [T]"}


def check_corpus(corpus: Corpus, reads_rows: bool) -> None:
    """Raises UserError if a plugin's dataset does not have what it must.

    Args:
        reads_rows: see `Task`.
    """
    if not is_plugin(corpus):
        return
    sources = ("documents", "samples", *(["rows"] if reads_rows else []))
    if not any(hasattr(corpus, name) for name in sources):
        raise UserError(f"{named(corpus)} has neither 'documents' nor 'samples'; a dataset has one of them")
    if not isinstance(corpus.tokenizer(), Tokenizer):
        refuse(named(corpus), "what tokenizer() returns", corpus.tokenizer(), "an ftk.tokenizers.base.Tokenizer")


def documents_of(corpus: Any, split: str) -> Any:
    """The documents of a split.

    Raises:
        UserError: those of a plugin's dataset are none, or the first one has no token ids.
    """
    if not is_plugin(corpus):
        return corpus.documents(split)
    with naming_mistakes(f"{named(corpus)} cannot make the documents of {split}"):
        documents = corpus.documents(split)
    if missing := [name for name in ("__len__", "__getitem__", "sizes") if not hasattr(documents, name)]:
        raise UserError(
            f"{named(corpus)}: what documents(split) returns has no {missing[0]!r}; documents have __len__, "
            f"__getitem__ (token ids of one, an array [T]) and sizes (tokens of each, int32 [D]), as "
            f"ftk.data.corpora.documents.DocumentList does"
        )
    with naming_mistakes(f"{named(corpus)} fails on its first document"):
        first = np.asarray(documents[0] if len(documents) else [])
    if first.size and (first.ndim != 1 or first.dtype.kind not in "iu"):
        value = first if first.ndim else documents[0]  # a text
        refuse(named(corpus), "the first document", value, "token ids, integers [T], as the tokenizer makes of texts")
    return documents


def complete_model_config(task: Task, chosen: Chosen) -> Any:
    """The options of the model, with those that the task derives.

    Raises:
        UserError: as `Task.complete_model_config`; it returns something else, or too small a vocabulary.
    """
    kind = chosen.entry.config
    try:
        config = task.complete_model_config(chosen.config)
    except (TypeError, AttributeError) as error:  # an option that this model does not have
        if not (usual := _usual_task(task, chosen)):
            raise
        raise UserError(f"{named(task)} does not fit the model {chosen.name} ({error}){usual}") from error
    if kind is not None and not isinstance(config, kind):
        refuse(named(task), "what complete_model_config returns", config, f"the options of the model, {named(kind)}")
    vocab_size = getattr(config, "vocab_size", None)
    if isinstance(vocab_size, int) and vocab_size < task.tokenizer.vocab_size:
        raise UserError(
            f"{named(task)}: complete_model_config leaves the model a vocab_size of {vocab_size}, but the tokenizer "
            f"has {task.tokenizer.vocab_size} tokens; it must return the config with a vocab_size that holds them"
        )
    return config


def check_criterion(task: Chosen, criterion: Chosen) -> None:
    """Raises UserError if a criterion is for another task only."""
    only = criterion.entry.task
    if only is not None and not issubclass(task.entry.target, TASKS.get(only).target):  # type: ignore[arg-type]
        raise UserError(
            f"`criterion` {criterion.name} is for `task` {only}, not for {task.name}; leave it out for the usual one"
        )


def load_samples(task: Task, split: str, train: bool = False) -> SampleDataset:
    """The samples of a split; where a plugin makes them, the first one is checked.

    Raises:
        UserError: as `Task.load_split`; what a plugin gives is no dataset of samples.
    """
    of_plugin = is_plugin(task) or is_plugin(task.corpus)
    mistakes = naming_mistakes(f"{named(task)} cannot make the samples of {split}")
    with mistakes if of_plugin else contextlib.nullcontext():
        dataset = task.load_training_split(split) if train else task.load_split(split)
    if of_plugin:
        _check_dataset(dataset, split, task)
    return dataset


def check_parts(task: Task, dataset: SampleDataset, model: nn.Module, criterion: Criterion, chosen: Chosen) -> None:
    """Take one sample through the collater and, where a part is a plugin's, through model and loss.

    Args:
        model: on the CPU; one on the meta device is not called.
        chosen: the model's configuration; its usual task stands in messages about a run with another one.

    Raises:
        UserError: one of them raises an error, or does not return what it must.
    """
    import torch

    from ftk.criterions.cross_entropy import CrossEntropy
    from ftk.modules.evaluation_mode import evaluation_mode

    who = f"the collater of {named(task)}"
    collater = task.collater()
    if not callable(collater):
        refuse(named(task), "what collater() returns", collater, "a function from a list of samples to a Batch")
    with naming_mistakes(f"{who} fails on the first sample"):
        batch = collater([dataset.sample(1, 0)])
    if is_plugin(task) or is_plugin(collater):
        _check_batch(batch, who)
    _check_inputs(batch, model, task, "" if is_plugin(task) else _usual_task(task, chosen))
    if len(batch.places) != len(batch.targets) and type(criterion).loss is CrossEntropy.loss:
        raise UserError(
            f"{named(criterion)} reads one hidden state for each target, but the batches of {named(task)} have more; "
            f"leave `criterion` out for the usual one"
        )
    # A form of attention may be for the GPU alone: where there is one, it is not tried on the CPU.
    form = None if torch.cuda.is_available() else attention_of_plugin(model)
    if form is None and not any(map(is_plugin, (task, task.corpus, dataset, model, criterion))):
        return
    if not any(parameter.is_meta for parameter in model.parameters()):
        if getattr(criterion, "reference", model) is None:  # it is loaded later, to another device
            criterion = copy.copy(criterion)
            criterion.reference = model  # type: ignore[attr-defined]
        with evaluation_mode(model), torch.random.fork_rng(devices=[]):
            _check_criterion(batch, model, criterion, task.tokenizer.vocab_size)


def _check_dataset(dataset: Any, split: str, task: Task) -> None:
    who = named(dataset)
    if missing := [name for name in ("__len__", "sizes", "sample") if not hasattr(dataset, name)]:
        found = "None" if dataset is None else f"{who}, which has no {missing[0]!r}"
        raise UserError(
            f"the samples of {named(task)} are {found}; a dataset of samples has __len__, sizes(epoch) and "
            f"sample(epoch, index)"
        )
    with naming_mistakes(f"{who} fails"):
        count, sizes = len(dataset), np.asarray(dataset.sizes(1))
        if count == 0:
            raise UserError(f"{who} has no sample of {split}: its length is 0")
        sample, again = dataset.sample(1, 0), dataset.sample(1, 0)
    if sizes.shape != (count,) or sizes.dtype.kind not in "iu":
        refuse(who, "sizes(1)", sizes, f"int32 [{count}], the most tokens of each sample")
    if not isinstance(sample, Mapping):
        refuse(who, "sample(1, 0)", sample, "a dictionary of NumPy arrays and numbers")
    if any(_differ(value, again.get(name)) for name, value in sample.items()):
        raise UserError(
            f"{who}: sample(1, 0) is not the same again; draw by seed, epoch and index (SampleRandom) alone"
        )
    if isinstance(collater := task.collater(), Collater):
        _check_sample(who, sample, int(sizes[0]))
        for name, names in collater.groups.items():
            number: Any = sample.get(name)
            if np.ndim(number) or number not in range(len(names)):
                found = f"sample(1, 0)[{name!r}] is {number}"
                raise UserError(f"{who}: {found}; it must be the number of its group: 0 to {len(names) - 1}")


def _differ(value: Any, again: Any) -> bool:
    """Whether two arrays of numbers, or two numbers, are not the same; of anything else it is not asked."""
    first, second = (np.asarray(one) if isinstance(one, np.ndarray | Number) else None for one in (value, again))
    if first is None or second is None or first.dtype.kind not in "biuf":
        return False
    return not np.array_equal(first, second, equal_nan=first.dtype.kind == "f")


def _check_sample(who: str, sample: Mapping[str, Any], size: int) -> None:
    """Refuses a sample that `Collater` cannot make a batch of."""
    for name, value in sample.items():
        if not isinstance(value, np.ndarray | Number):
            refuse(who, f"sample(1, 0)[{name!r}]", value, "a NumPy array or a number")
    for name, form in _ARRAYS.items():
        if name not in sample:
            forms = ", ".join(f"{name} {form}" for name, form in _ARRAYS.items())
            raise UserError(f"{who}: sample(1, 0) has no {name!r}; the task's collater needs {forms}")
        if np.ndim(sample[name]) != 1 or sample[name].dtype != form.split()[0]:
            refuse(who, f"sample(1, 0)[{name!r}]", sample[name], form)
    source, targets = len(sample["tokens"]), len(sample["targets"])
    if "decoder_tokens" not in sample and source != targets:  # else the source has a length of its own
        refuse(who, "sample(1, 0)['targets']", sample["targets"], f"as long as the tokens, [..., {source}]")
    for name, value in sample.items():
        if np.ndim(value) and name != "tokens" and np.shape(value)[-1] != targets:
            other = "targets" if "decoder_tokens" in sample else "tokens"
            refuse(who, f"sample(1, 0)[{name!r}]", value, f"as long as the {other}, [..., {targets}]")
    longest = max(source, targets)
    if longest > size:
        raise UserError(f"{who}: sample(1, 0) has {longest} tokens, but sizes(1)[0] is {size}; it must be a maximum")
    least = sample["targets"][sample["loss_mask"]].min(initial=0)
    if least < 0:
        raise UserError(
            f"{who}: sample(1, 0)['targets'] has {least} where loss_mask is True; where nothing is learned it is False"
        )


def _check_batch(batch: Any, who: str) -> None:
    import torch

    if not isinstance(batch, Batch):
        refuse(who, "what it returns", batch, "an ftk.batch.Batch")
    places = batch.places
    tokens: Any = batch.inputs.get("tokens")
    for name, value, form in (("inputs['tokens']", tokens, "int64 [B, T]"), ("places", places, "int64 [N]")):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or value.ndim != form.count(",") + 1:
            refuse(who, f"the batch's {name}", value, form)
    for name, value in (("targets", batch.targets), ("weights", batch.weights)):
        if name == "weights" and value is None:
            continue
        if not isinstance(value, torch.Tensor) or not value.ndim or len(value) != len(places):
            refuse(who, f"the batch's {name}", value, f"one for each of the {len(places)} places, [N]")
    count = batch.placed_tokens.numel()
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < count:
        raise UserError(
            f"{who}: the batch's places are from {int(places.min())} to {int(places.max())}; they must be from 0 to "
            f"{count - 1}, places in the flattened tokens"
        )


def _usual_task(task: Task, chosen: Chosen) -> str:
    """What to do about a task that is not the model's usual one, to end a message; "" if it is."""
    usual = chosen.entry.task
    if usual is None or usual not in TASKS or type(task) is TASKS.get(usual).target:
        return ""
    return f"; {chosen.arch or chosen.name} is trained by `task` {usual}: leave `task` out"


def _check_inputs(batch: Batch, model: Any, task: Task, usual: str) -> None:
    """Refuses a batch whose inputs are not those that the model takes; `usual` ends the messages."""
    from ftk.models.base import Backbone

    inputs, axes = batch.inputs, getattr(model, "INPUTS", None)
    given = f"the batches of {named(task)} have {', '.join(inputs)}"
    if axes is None:
        if isinstance(model, Backbone):
            raise UserError(f"{named(model)} has no 'INPUTS', the names of its inputs and their axes; {given}")
        function = getattr(model, "hidden_states", model.forward)
        try:
            inspect.signature(function).bind(**inputs)
        except TypeError as error:
            what = f"{function.__name__}{inspect.signature(function)}"
            raise UserError(f"{named(model)}: {what}: {error}; {given}{usual}") from None
        return
    for name in inputs:
        if name not in axes:
            raise UserError(f"{named(model)} does not take {name!r}: its INPUTS are {', '.join(axes)}; {given}{usual}")
    for part in (getattr(model, name) for name in getattr(model, "TAKES_INPUTS", ("embed", "attend"))):
        for name, parameter in inspect.signature(part).parameters.items():
            if parameter.default is parameter.empty and name not in inputs:
                raise UserError(
                    f"{named(model)} needs {name!r} ('{part.__name__}' has no default for it); {given}{usual}"
                )
    known = {
        axis: size
        for name in ("tokens", "decoder_tokens")
        if name in inputs
        for axis, size in zip(axes[name].split(), inputs[name].shape, strict=True)
    }
    for name, value in inputs.items():
        wanted = [known.get(axis, int(axis) if axis.isdecimal() else None) for axis in axes[name].split()]
        shape = [*getattr(value, "shape", ())]
        if len(shape) != len(wanted) or any(a not in (None, b) for a, b in zip(wanted, shape, strict=True)):
            refuse(named(model), f"{name!r} of the batches of {named(task)}", value, f"[{axes[name]}] (INPUTS){usual}")


def _check_criterion(batch: Batch, model: Any, criterion: Criterion, vocab_size: int) -> None:
    """Refuses a model that returns no hidden states or no score for each token of the vocabulary, and a criterion that
    returns no loss of them."""
    import torch

    from ftk.criterions.base import OF_RECORDS, LossOutput, trunk_and_head
    from ftk.criterions.cross_entropy import CrossEntropy

    hidden = _hidden_states(batch, model).flatten(0, 1).index_select(0, batch.places)  # [N, H]
    _, head = trunk_and_head(model)
    with torch.no_grad(), naming_mistakes(f"the head of {named(model)} fails on the hidden states {[*hidden.shape]}"):
        scores = head(hidden)
    who = named(criterion)
    if type(criterion).loss is CrossEntropy.loss and scores.size(-1) < vocab_size:
        what = f"scores are {[*scores.shape]}"
        raise UserError(f"{named(model)}: its {what}; the last axis must be the vocabulary, at least {vocab_size}")
    with naming_mistakes(f"{who} fails on the first sample"):
        if criterion.is_single_pass() or not is_plugin(criterion):  # those of ftk may need another model for more
            output = criterion.loss(head, hidden.requires_grad_(), batch)
        else:
            output = criterion(model, batch)
        count = criterion.count(batch)
    if not isinstance(output, LossOutput):
        refuse(who, "what it returns", output, "an ftk.criterions.base.LossOutput(loss, num_targets, meters)")
    for name, value in (("loss", output.loss), ("num_targets", output.num_targets)):
        if not isinstance(value, torch.Tensor) or value.ndim:
            refuse(who, f"the {name} that it returns", value, "a sum over the targets, a tensor of shape []")
    if not output.loss.requires_grad:
        raise UserError(f"{who}: the loss that it returns has no gradient; it must depend on the hidden states")
    if abs(float(output.num_targets) - count) > 1e-3 * max(1.0, count):
        raise UserError(
            f"{who}: num_targets is {float(output.num_targets):g}, but count(batch) is {count:g}; they must be equal"
        )
    if is_plugin(criterion) and _has_parameters(criterion):
        raise UserError(
            f"{who} has parameters of its own, which are neither trained nor saved; put them into the model"
        )
    if is_plugin(criterion) and criterion.is_single_pass() and _is_mean(batch, hidden, head, criterion, output):
        raise UserError(f"{who}: the loss of twice the targets is no greater; it must be a sum over them, not a mean")
    for name, meter in output.meters.items():
        if OF_RECORDS.fullmatch(name):
            raise UserError(f"{who}: the meter {name!r} has the name of a figure of every record; give it another")
        if not isinstance(meter, tuple) or len(meter) != 2 or any(getattr(each, "ndim", 1) for each in meter):
            refuse(who, f"the meter {name!r}", meter, "(sum, count), two tensors of shape []")


def _has_parameters(criterion: Any) -> bool:
    """Whether a criterion keeps something that asks for gradients, its reference apart."""
    import torch

    own = getattr(criterion, "__dict__", {})
    kept = {**own, **own.get("_parameters", {}), **own.get("_modules", {})}
    kept.pop("reference", None)
    modules = (part.parameters() for part in kept.values() if isinstance(part, torch.nn.Module))
    alone = (part for part in kept.values() if isinstance(part, torch.nn.Parameter))
    return any(parameter.requires_grad for parameter in (*alone, *itertools.chain.from_iterable(modules)))


def _is_mean(batch: Batch, hidden: Any, head: Any, criterion: Criterion, once: LossOutput) -> bool:
    """Whether twice the same targets count twice, and have the loss of once; False where that cannot be asked."""
    import torch

    if batch.extras or batch.groups or len(batch.places) != len(batch.targets):
        return False
    weights = None if batch.weights is None else batch.weights.repeat(2)
    targets = torch.cat((batch.targets, batch.targets))
    doubled = dataclasses.replace(batch, targets=targets, places=batch.places.repeat(2), weights=weights)
    try:
        with torch.no_grad():
            twice = criterion.loss(head, hidden.repeat(2, 1), doubled)
    except Exception:  # it looks at the form of the batch, which is another here
        return False
    loss, count = (
        float(two.detach() / one.detach()) if one else math.nan for one, two in zip(once[:2], twice[:2], strict=True)
    )
    return count > 1.5 and abs(loss - 1.0) < 0.01


def _hidden_states(batch: Batch, model: Any) -> Any:
    """[B, T, H] of a batch, or the scores [B, T, V] of a model without a head."""
    import torch

    from ftk.criterions.base import trunk_and_head

    tokens, who = batch.inputs["tokens"], named(model)
    if hasattr(model, "hidden_states") and not hasattr(model, "head"):
        raise UserError(f"{who} has 'hidden_states' but no 'head', which makes scores [N, V] of them")
    reads = f"{tokens.size(1)} tokens from {int(tokens.min())} to {int(tokens.max())}"
    if form := attention_of_plugin(model):
        reads += f", with the attention of {named(ATTENTIONS.get(form).target)}"
    with torch.no_grad(), naming_mistakes(f"{who} fails on the first sample, {reads}"):
        hidden = trunk_and_head(model)[0](**batch.inputs)
    is_floats = isinstance(hidden, torch.Tensor) and hidden.is_floating_point()
    if not is_floats or hidden.ndim != 3 or hidden.shape[:2] != tokens.shape:
        what, last = ("hidden_states", "H") if hasattr(model, "hidden_states") else ("forward", "V")
        refuse(who, f"what {what} returns", hidden, f"one tensor of floats [B, T, {last}] for tokens {[*tokens.shape]}")
    return hidden
