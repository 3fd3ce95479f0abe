"""Puts into words how a run was made: its recipe from config.json, its machines and versions from run.json."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mst_scale.config.support import precision_of
from mst_scale.report.groups import Group
from mst_scale.report.page import Table
from mst_scale.report.reading import Run, moment, plan
from mst_scale.report.style import PHASES
from mst_scale.report.table import NONE, upright

Facts = dict[str, str]


def tables(title: str, groups: Sequence[Group], about: Callable[[Run], Facts]) -> list[Table]:
    """What `recipe` or `machine` tells: what the runs share, and what not. Of a group's seeds all that occurs."""
    told = [[about(run) for run in group.runs] for group in groups]
    names = dict.fromkeys(name for group in told for facts in group for name in facts)
    lines = []
    for name in names:
        lines.append((name, [", ".join(dict.fromkeys(f[name] for f in group if name in f)) or NONE for group in told]))
    same = [(name, cells[0]) for name, cells in lines if len(set(cells)) == 1]
    differing = [line for line in lines if len(set(line[1])) > 1]
    found = [Table(title if len(groups) == 1 else f"{title} of all runs", [], same)] if same else []
    if differing:
        found.append(upright(f"{title} where runs differ", [("run", [group.name for group in groups]), *differing]))
    return found


def recipe(run: Run) -> Facts:
    """What the config says; what it does not say is left out."""
    of, start = run.setting, run.starts[-1] if run.starts else {}
    model, batch = (found if isinstance(found := start.get(key), dict) else {} for key in ("model", "batch"))
    facts = {
        "method": _words(of("mst", "method")),
        "model": _words(
            of("model", "arch"), (of("model", "n_layer"), "layers"), (of("model", "n_head"), "heads"),
            (of("model", "n_embd"), "wide"), ("vocabulary", of("model", "vocab_size")),
            model.get("class"), (model.get("parameters"), "parameters"),
        ),
        "data": _words(of("data", "source") or of("data", "dir"), ("tokenizer", of("data", "tokenizer"))),
        "batch": _words(
            (of("train_batch_size") or batch.get("sequences"), "sequences"), (of("model", "seq_length"), "tokens each")
        ),
        "learning rate": _words(
            of("optimizer", "params", "lr"), of("training", "lr_schedule"),
            ("warm-up", _span(of("training", "warmup"))),
            ("decay", _span(of("training", "decay")) if of("training", "lr_schedule") == "wsd" else None),
            ("anew after", _span(of("training", "restart") or None)),
            ("at least", of("training", "min_lr")),
        ),
        "optimizer": _words(of("optimizer", "type"), *_parameters(of("optimizer", "params"))),
        "gradient clipping": _words(of("gradient_clipping")),
        "precision": precision_of(run.config) if run.config else None,
        "ZeRO stage": _words(of("zero_optimization", "stage")),
        "seed": None if run.seed is None else str(run.seed),
        "initial weights": _words(of("training", "init"), ("grown from", of("mst", "grow_from"))),
    }  # fmt: skip
    return {name: said for name, said in (facts | _sparsity(run)).items() if said}


def _sparsity(run: Run) -> Facts:
    """The method's parts, as far as they are at work."""
    of, facts = run.setting, {}
    if run.schedule is not None and plan(run.schedule)[1].max() > 0:
        phases = [(PHASES.get(phase.name, phase.name), "to step", f"{phase.stop:,}") for phase in run.schedule.phases]
        facts["phases"] = _words(*phases)
        facts["sparsity"] = _words(
            (_span(of("mst", "sparsity", "max")), "at most"), of("mst", "sparsity", "distribution"),
            ("variation", of("mst", "sparsity", "variation")),
        )  # fmt: skip
        facts["topology"] = _words(
            ("policy", of("mst", "topology", "policy")), ("every", of("mst", "topology", "interval"), "steps"),
            ("update fraction", of("mst", "topology", "update_fraction"), of("mst", "topology", "update_schedule")),
            ("granularity", of("mst", "topology", "granularity")),
        )  # fmt: skip
    if any(span.attention != "dense" for span in run.spans):
        facts["attention"] = _words(
            of("mst", "attention", "pattern"), ("stride", of("mst", "attention", "stride")),
            ("dense from", of("mst", "attention", "dense_from")),
        )  # fmt: skip
    return facts


def machine(run: Run) -> Facts:
    """What the last start that took a step says."""
    start: dict[str, Any] = run.starts[-1] if run.starts else {}
    git, versions, hosts = (start.get(key) for key in ("git", "versions", "hosts"))
    git, versions = (found if isinstance(found, dict) else {} for found in (git, versions))
    changed, command = git.get("changed"), start.get("command")
    facts = {
        "started": _words(moment(start.get("time")), (len(run.starts), "starts") if len(run.starts) > 1 else None),
        "ended": _words(moment(start.get("ended")), start.get("how")),
        "ranks": _words(start.get("ranks")),
        "hosts": _words(*_counted(hosts)),
        "hardware": _words(start.get("device")),
        "job": _words(*(start["job"].items() if isinstance(start.get("job"), dict) else ())),
        "commit": _words(
            str(git.get("commit") or "")[:12],
            f"{len(changed)} files changed" if isinstance(changed, list) and changed else None,
        ),
        "versions": _words(*(item for item in versions.items() if item[0] != "system")),
        "system": _words(versions.get("system")),
        "command": shlex.join(["python", *map(str, command[1:])]) if isinstance(command, list) else None,
        "folder": str(run.folder),
    }
    return {name: said for name, said in facts.items() if said}


def _words(*parts: Any) -> str:
    """Parts with commas; one that holds None is not said. A tuple is one part."""
    said = []
    for part in parts:
        words = part if isinstance(part, tuple) else (part,)
        if all(word is not None and word != "" for word in words):
            said.append(" ".join(f"{word:,}" if type(word) is int else str(word) for word in words))
    return ", ".join(said)


def _span(value: Any) -> str | None:
    """A share of the run, or steps."""
    if isinstance(value, float):
        return f"{100 * value:.3g} %"
    return None if value is None else f"{value} steps"


def _parameters(params: Any) -> list[tuple[str, Any]]:
    """Of an optimizer, but for the learning rate."""
    found = params.items() if isinstance(params, dict) else ()
    lists = {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in found}
    return [(name.replace("_", " "), value) for name, value in lists.items() if name != "lr"]


def _counted(hosts: Any) -> list[str]:
    """`a × 8`, `b × 8`: ranks by host."""
    found = Counter(map(str, hosts)) if isinstance(hosts, list) else {}
    return [host if count == 1 else f"{host} × {count}" for host, count in found.items()]
