"""Classifiers in Hugging Face's form: of texts, for which the first token stands, and of words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ftk.checkpoint.layout import HEAD
from ftk.config.build import build_options
from ftk.errors import UserError
from ftk.models.conversion import Contents, Converter
from ftk.models.renames import Rename, weight_and_bias
from ftk.modules.classifier import PART
from ftk.modules.heads import HeadShape

OF_TEXTS, OF_WORDS = "ForSequenceClassification", "ForTokenClassification"  # ends of architectures
_WORDS = "token_labels"  # our kind
_OUTPUT_OF_WORDS = "classifier"  # in every family
_PROBLEMS = {"single_label": "single_label_classification", "regression": "regression"}  # by our kinds


def classifier_in(
    config: Mapping[str, Any], converter: Converter, options: Any, stored: Callable[[], Mapping[str, Tensor]]
) -> tuple[HeadShape, dict[str, Any]] | None:
    """The head of a config.json, and the section `task` of config.yaml; None: it is of another model.

    Args:
        config: the config.json.
        converter: of the family.
        options: of the body.
        stored: describes the tensors that there are.

    Raises:
        UserError: such a classifier is not known here.
    """
    names = config.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    of_words = any(name.endswith(OF_WORDS) for name in names)
    if not converter.classifier or not (of_words or any(name.endswith(OF_TEXTS) for name in names)):
        return None
    output = stored().get(f"{_parts(converter, not of_words)['output']}.weight")
    count = 0 if output is None or not output.ndim else len(output)
    problem = config.get("problem_type") or _PROBLEMS["regression" if count == 1 else "single_label"]
    kind = _WORDS if of_words else next((kind for kind, theirs in _PROBLEMS.items() if theirs == problem), None)
    if kind is None or count == 0 or (kind == "regression") != (count == 1 and not of_words):
        raise UserError(
            f"config.json: problem_type {problem!r:.60} with {count} outputs; ftk's classifiers choose one of several "
            f"labels, or predict one number"
        )
    known = config.get("id2label")
    known = known if isinstance(known, dict) else {}
    labels = [str(known.get(str(number), f"LABEL_{number}")) for number in range(count)]
    dropout = config.get("classifier_dropout")
    dropout = config.get("hidden_dropout_prob", 0.1) if dropout is None else dropout
    shape = build_options(HEAD, HeadShape, {"num_outputs": count, "head_dropout": dropout, "head_layer": not of_words})
    seq_length = converter.task(options)["seq_length"]
    own = {"head_layer": shape.head_layer, "head_dropout": shape.head_dropout}
    return shape, {"_name": "classification", "kind": kind, "labels": labels, "seq_length": seq_length, **own}


def renames_of(converter: Converter, head: HeadShape | None, config: Any) -> Sequence[Rename]:
    """All parameters of a model, with those of a classifier in the place of its output layer where there is one."""
    renames = [rename for rename in converter.renames if converter.tied(config).keys().isdisjoint(rename.theirs)]
    if head is None:
        return renames
    kept = [rename for rename in renames if not rename.ours[0].startswith(converter.output_layer)]
    parts = (weight_and_bias(f"{PART}.{part}", theirs) for part, theirs in parts_of(converter, head).items())
    return [*kept, *(rename for pair in parts for rename in pair)]


def parts_of(converter: Converter, head: HeadShape | None) -> Mapping[str, str]:
    """Part of a classifier -> their name; none of other models."""
    return {} if head is None else _parts(converter, head.head_layer)


def _parts(converter: Converter, head_layer: bool) -> Mapping[str, str]:
    return converter.classifier if head_layer else {"output": _OUTPUT_OF_WORDS}


def classifier_config(contents: Contents, converter: Converter, own: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that say what a classifier is; none for other models.

    Args:
        contents: of the model.
        converter: of the family.
        own: config.json of the same body with its output layer.

    Raises:
        UserError: they have no such classifier.
    """
    if contents.head is None:
        return {}
    kind, number = str(contents.task.get("kind", "single_label")), str(contents.task.get("label_field", "label"))
    labels = [*contents.task.get("labels", ())] or ["LABEL_0" if number == "label" else number]
    of_words = kind == _WORDS and not contents.head.head_layer
    of_texts = kind in _PROBLEMS and contents.head.head_layer and contents.task.get("pool") != "last"
    if not converter.classifier or not (of_words or of_texts):
        raise UserError(
            f"{contents.place}: Hugging Face's form has classifiers of one label or number from the first token of an "
            f"encoder, with `head_layer`, and of the labels of words, without; this model has another"
        )
    ending, problem = (OF_WORDS, {}) if of_words else (OF_TEXTS, {"problem_type": _PROBLEMS[kind]})
    return {
        "architectures": [own["architectures"][0].partition("For")[0] + ending],
        **problem,
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "classifier_dropout": contents.head.head_dropout,
    }
