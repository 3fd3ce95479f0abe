"""Defines the tasks that the paper evaluates on, and reads their documents.

    lambada                     the last word of a passage                        accuracy, perplexity
    wikitext2 ptb wikitext103   the test text as one sequence                     perplexity per token and per word
    1bw
    rte mrpc                    entailment, paraphrase of two sentences           few-shot accuracy

Documents are read from the hub, or from files in a folder (`--data-dir`), named after the task:

    lambada.jsonl               {"text": "…"} per line; or lambada.txt, a passage per line
    wikitext2.txt               the text as it stands; or wikitext2.jsonl, {"text": "…"} per line, joined by empty lines
    rte.jsonl                   {"sentence1": "…", "sentence2": "…", "label": 0 or 1} per line, GLUE's labels:
                                rte 0 entailment, 1 not; mrpc 1 the same meaning, 0 not
    rte.train.jsonl             the same form: examples for the prompt
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mst_scale.data.sources import whole_text
from mst_scale.errors import UserError, suggestion

Doc = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task. `fields` are the required fields of a document, `hub` the arguments of datasets.load_dataset."""

    name: str
    title: str
    kind: str  # "last word", "text" or "choice"
    fields: Mapping[str, type]
    hub: dict[str, Any]
    split: str
    column: str = "text"  # of the hub's data set
    prompt: str = ""
    choices: tuple[str, ...] = ()


TEXT: dict[str, type] = {"text": str}
PAIR: dict[str, type] = {"sentence1": str, "sentence2": str, "label": int}
GLUE = "nyu-mll/glue"
# Data sets that are scripts on the hub are read from the parquet files that the hub has converted them to.
PARQUET = "refs/convert/parquet"
TASKS = {
    task.name: task
    for task in (
        Task("lambada", "LAMBADA", "last word", TEXT, {"path": "EleutherAI/lambada_openai", "name": "default"}, "test"),
        Task(
            "wikitext2", "WikiText2", "text", TEXT, {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1"}, "test"
        ),
        Task("ptb", "PTB", "text", TEXT, {"path": "ptb-text-only/ptb_text_only", "revision": PARQUET}, "test",
             column="sentence"),
        Task("wikitext103", "WikiText103", "text", TEXT,
             {"path": "Salesforce/wikitext", "name": "wikitext-103-raw-v1"}, "test"),
        Task("1bw", "1BW", "text", TEXT, {"path": "billion-word-benchmark/lm1b", "revision": PARQUET}, "test"),
        Task("rte", "RTE", "choice", PAIR, {"path": GLUE, "name": "rte"}, "validation",
             prompt="{sentence1}\nQuestion: {sentence2} True or False?\nAnswer:", choices=("True", "False")),
        Task("mrpc", "MRPC", "choice", PAIR, {"path": GLUE, "name": "mrpc"}, "validation",
             prompt="Sentence 1: {sentence1}\nSentence 2: {sentence2}\n"
             "Question: Do both sentences mean the same thing?\nAnswer:", choices=("no", "yes")),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Documents:
    """The documents of a task to score, and the examples for prompts."""

    test: list[Doc]
    train: list[Doc]
    source: str

    @property
    def digest(self) -> str:
        """A digest of all documents."""
        return hashlib.sha256(json.dumps([self.test, self.train]).encode()).hexdigest()


def choose(names: str | Iterable[str]) -> list[Task]:
    """Return the tasks of these names, or all tasks for "all".

    Raises:
        UserError: if a name is unknown.
    """
    wanted = names.split(",") if isinstance(names, str) else list(names)
    wanted = [name.strip() for name in wanted if name.strip()]
    if wanted == ["all"]:
        return list(TASKS.values())
    if not wanted:
        raise UserError(f"no task is given: choose from {', '.join(TASKS)}, or all")
    for name in wanted:
        if name not in TASKS:
            near = suggestion(name.lower(), TASKS)
            raise UserError(f"unknown task {name!r}{near} (there are {', '.join(TASKS)})")
    return [TASKS[name] for name in dict.fromkeys(wanted)]


def documents(task: Task, folder: Path | None, shots: int) -> Documents:
    """Read the documents of a task from `folder`, or from the hub, with at least `shots` examples for prompts.

    Raises:
        UserError: if files are missing or malformed, or there are too few examples.
        OSError: if the hub cannot be reached.
    """
    needs_train = task.kind == "choice" and shots > 0
    found = _from_folder(task, folder, needs_train) if folder is not None else _from_hub(task, needs_train)
    if not found.test:
        raise UserError(f"{found.source} contains no document")
    if needs_train and len(found.train) < shots:
        raise UserError(f"{task.name}: {shots} examples are needed, but there are {len(found.train)}: lower --shots")
    return found


def _from_folder(task: Task, folder: Path, needs_train: bool) -> Documents:
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: --data-dir must contain the tasks' files (mst eval --help)")
    path = next((p for p in _candidates(task, folder) if p.is_file()), None)
    if path is None:
        names = " or ".join(p.name for p in _candidates(task, folder))
        raise UserError(f"{folder} has no {names} for task {task.name!r} (mst eval --help describes the format)")
    rows = _read(task, path)
    train: list[Doc] = []
    if needs_train:
        examples = folder / f"{task.name}.train.jsonl"
        if not examples.is_file():
            raise UserError(f"{folder} has no {examples.name} with examples for few-shot prompts: add it, or --shots 0")
        train = _read(task, examples)
    return Documents([row for row in rows if row.get("text", "x").strip()], train, str(path))


def _candidates(task: Task, folder: Path) -> list[Path]:
    kinds = ("jsonl",) if task.kind == "choice" else ("jsonl", "txt")
    return [folder / f"{task.name}.{kind}" for kind in kinds]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # with the ends of its lines as they are
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} cannot be read; convert it") from None


def _read_lines(path: Path, fields: Mapping[str, type]) -> list[Doc]:
    """Return the objects of a .jsonl file, with these fields only; errors name the line."""
    rows = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON ({error.msg}); each line is one object") from None
        for name, kind in fields.items():
            value = row.get(name) if isinstance(row, dict) else None
            if not isinstance(value, kind) or isinstance(value, bool):
                expected = {str: "a string", int: "an integer"}[kind]
                raise UserError(f"{path}:{number}: {name!r} must be {expected}, not {value!r}")
        found = {name: row[name] for name in fields}
        rows.append({name: whole_text(value) if isinstance(value, str) else value for name, value in found.items()})
    return rows


def _read(task: Task, path: Path) -> list[Doc]:
    """Return the documents of a file; errors name the line or the document."""
    if path.suffix == ".txt":
        text = _text(path)
        lines = [line for line in re.split("\r\n|\r|\n", text) if line.strip()]
        rows = [{"text": part} for part in (lines if task.kind == "last word" else [text])]
    else:
        rows = _read_lines(path, task.fields)
        if task.kind == "text":
            rows = [{"text": "\n\n".join(row["text"] for row in rows)}]
    for number, row in enumerate(rows, start=1):
        if task.kind == "choice" and row["label"] not in range(len(task.choices)):
            raise UserError(f"{path}: document {number} has label {row['label']}; labels must be 0 or 1")
        if task.kind == "last word" and len(row["text"].split()) < 2:
            raise UserError(f"{path}: document {number} has no word before its last: {row['text'][:40]!r}")
    return rows


def _from_hub(task: Task, needs_train: bool) -> Documents:
    from datasets import load_dataset

    try:
        test = load_dataset(**task.hub, split=task.split)
        train = load_dataset(**task.hub, split="train") if needs_train else []
    except Exception as error:  # no network, a proxy's page, a data set that was moved: each has its own class
        raise OSError(
            f"data set {task.hub['path']} of task {task.name!r} cannot be downloaded ({type(error).__name__}): put "
            f"{' or '.join(p.name for p in _candidates(task, Path()))} into a folder and pass it as --data-dir"
        ) from None
    if task.kind == "text":
        return Documents([{"text": "\n\n".join(test[task.column])}], [], task.hub["path"])
    keep = list(task.fields)
    rows, examples = ([{name: row[name] for name in keep} for row in part] for part in (test, train))
    return Documents(rows, examples, task.hub["path"])
