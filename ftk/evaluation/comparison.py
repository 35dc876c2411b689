"""Answers of another model to the same rows, for the difference of two models with standard errors of pairs."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ftk.data.supervised.rows import rows_of
from ftk.errors import UserError
from ftk.evaluation.metrics import Record, in_groups
from ftk.evaluation.results import PREDICTIONS, RESULTS
from ftk.files import as_user_error, read_json, sha256_of


class OtherModel:
    """What ftk-evaluate has written of another model.

    Args:
        folder: see `write_results`.

    Raises:
        UserError: there are no such files, or they are others.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with as_user_error(f"`compare` {folder}: {RESULTS}"):
            content = read_json(folder / RESULTS)
        if not isinstance(content, dict) or not isinstance(content.get("data_sha256"), dict):
            self._refuse(f"{RESULTS} holds no results of ftk-evaluate")
        self._sha256, self._limit = content["data_sha256"], content.get("limit")
        self._records: dict[tuple[str, str], list[Record]] = {}
        for row in rows_of(str(folder / PREDICTIONS)):
            self._records.setdefault((row.text("evaluation"), row.text("data")), []).append(dict(row.values))

    def records(self, line: str, data: str, files: Sequence[str], limit: int | None) -> list[Record]:
        """Those of an evaluation of the same rows.

        Args:
            line: the evaluation; without the same one, the only one of its name.
            data: as of `Result`.
            files: what is read of it.
            limit: the first rows alone.

        Raises:
            UserError: there are none.
        """
        name, file = line.split()[0], Path(data).name
        like = [key for key in self._records if key[0].split()[0] == name and Path(key[1]).name == file]
        keys = [key for key in like if key[0] == line] or like
        if len(keys) != 1:
            there = ", ".join(f"{line!r} of {data}" for line, data in self._records)
            self._refuse(f"has {len(keys) or 'no'} evaluations like {line!r} of {file}; there are: {there}")
        if not {sha256_of(Path(file)) for file in files} <= {*map(str, self._sha256.values())}:
            self._refuse(f"its {file} had another content; evaluate that model anew")
        if limit != self._limit:
            its, own = ("all rows" if most is None else f"`limit` {most}" for most in (self._limit, limit))
            self._refuse(f"is of {its}, this evaluation of {own}")
        return self._records[keys[0]]

    def _refuse(self, problem: str) -> NoReturn:
        raise UserError(f"`compare` {self._folder}: {problem}")


def mismatch(
    records: Sequence[Record], others: Sequence[Record], group: Callable[[Mapping[str, Any]], Hashable]
) -> str | None:
    """Why the records of two models, with labels, make no pairs; None: they do.

    Args:
        records: at least one.
    """
    if missing := {*records[0]} - {*records[0]}.intersection(*others):
        return f"its answers are of another version of ftk, without {', '.join(sorted(missing))}; evaluate it anew"
    own, its = ([*map(_labels, in_groups(each, group))] for each in (records, others))
    if len(own) != len(its):
        return f"it was asked about {len(its):,} texts, this model about {len(own):,}"
    number = next((number for number, pair in enumerate(zip(own, its, strict=True), 1) if pair[0] != pair[1]), None)
    return None if number is None else f"text {number:,} had another right answer"


def _labels(group: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """The labels of records as JSON holds them; None where nothing is right or wrong."""
    return [json.dumps(record["label"]) for record in group] if "label" in group[0] else None
