"""Classifiers in Hugging Face's form, `…ForSequenceClassification`, where the first token stands for a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ftk.checkpoint.layout import HEAD
from ftk.config.build import build_options
from ftk.errors import UserError
from ftk.models.conversion import Contents, Converter, Rename, weight_and_bias
from ftk.modules.classifier import PART
from ftk.modules.heads import HeadShape

_ENDING = "ForSequenceClassification"
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
    names = names if isinstance(names, list) else ()
    if not converter.classifier or not any(str(name).endswith(_ENDING) for name in names):
        return None
    output = stored().get(f"{converter.classifier['output']}.weight")
    count = 0 if output is None or not output.ndim else len(output)
    problem = config.get("problem_type") or _PROBLEMS["regression" if count == 1 else "single_label"]
    kind = next((kind for kind, theirs in _PROBLEMS.items() if theirs == problem), None)
    if kind is None or count == 0 or (kind == "regression") != (count == 1):
        raise UserError(
            f"config.json: problem_type {problem!r:.60} with {count} outputs; ftk's classifiers choose one of several "
            f"labels, or predict one number"
        )
    known = config.get("id2label")
    known = known if isinstance(known, dict) else {}
    labels = [str(known.get(str(number), f"LABEL_{number}")) for number in range(count)] if count > 1 else []
    dropout = config.get("classifier_dropout")
    dropout = config.get("hidden_dropout_prob", 0.1) if dropout is None else dropout
    shape = build_options(HEAD, HeadShape, {"num_outputs": count, "head_dropout": dropout})
    seq_length = converter.task(options)["seq_length"]
    own = {"head_layer": True, "head_dropout": shape.head_dropout}
    return shape, {"_name": "classification", "kind": kind, "labels": labels, "seq_length": seq_length, **own}


def renames_of(converter: Converter, head: HeadShape | None) -> Sequence[Rename]:
    """All parameters of a family, with those of a classifier in the place of its output layer where there is one."""
    if head is None:
        return converter.renames
    kept = [one for one in converter.renames if not one.ours[0].startswith(converter.output_layer)]
    parts = (weight_and_bias(f"{PART}.{own}", theirs) for own, theirs in converter.classifier.items())
    return [*kept, *(each for pair in parts for each in pair)]


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
    kind, labels = str(contents.task.get("kind", "single_label")), [*contents.task.get("labels", ())] or ["LABEL_0"]
    is_known = kind in _PROBLEMS and contents.head.head_layer and contents.task.get("pool") != "last"
    if not converter.classifier or not is_known:
        raise UserError(
            f"{contents.place}: Hugging Face's form has classifiers of one label or number from the first token of an "
            f"encoder, with `head_layer`; this model has another"
        )
    return {
        "architectures": [own["architectures"][0].partition("For")[0] + _ENDING],
        "problem_type": _PROBLEMS[kind],
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "classifier_dropout": contents.head.head_dropout,
    }
