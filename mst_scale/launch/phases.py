"""Divides a run into jobs of its phases, each with its own number of nodes (`mst launch slurm --nodes-by-phase`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mst_scale.errors import UserError
from mst_scale.pretrain.start import parse_arguments, read_experiment
from mst_scale.sparsity_variation import PHASES, Schedule


@dataclass(frozen=True)
class Share:
    """The part of a run that one job trains."""

    phases: tuple[str, ...]
    nodes: int
    stop_at: int | None
    """The step after which the job ends; None for the last one."""

    @property
    def name(self) -> str:
        """The phases in words."""
        return "+".join(self.phases)


def shares_of(text: str, config: str, arguments: Sequence[str]) -> list[Share]:
    """Return the jobs of a run, in order.

    Args:
        text: The option, "warmup=4,ultra=1,restore=4,dense=4".
        config: The config of the run.
        arguments: The arguments of `mst_scale.pretrain`.

    Raises:
        UserError: The option does not name the phases of the run, each once.
    """
    nodes = _nodes(text)
    schedule = read_experiment(parse_arguments(["--deepspeed_config", config, *arguments])).schedule
    names = [phase.name for phase in schedule.phases if phase.stop > phase.start]
    if sorted(nodes) != sorted(set(names)):
        raise UserError(
            f"--nodes-by-phase {text}: this run has the phases {', '.join(dict.fromkeys(names))}: name each of them "
            "once (mst plan shows their steps)"
        )
    shares: list[Share] = []
    for phase in schedule.phases:
        if phase.stop == phase.start:
            continue
        if shares and shares[-1].nodes == nodes[phase.name]:
            names_so_far = (*shares.pop().phases, phase.name)
        else:
            names_so_far = (phase.name,)
        shares.append(Share(names_so_far, nodes[phase.name], _last_step(schedule, phase.stop)))
    return shares


def _nodes(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in PHASES or not (number.isascii() and number.isdigit() and int(number) > 0) or name in found:
            raise UserError(
                f"--nodes-by-phase {text}: write each phase once with its number of nodes, such as "
                "warmup=4,ultra=1,restore=4,dense=4"
            )
        found[name] = int(number)
    return found


def _last_step(schedule: Schedule, stop: int) -> int | None:
    """Return the last step of a job whose phases end before step `stop`.

    Step `stop` ends with the topology step into the next phase. If that grows weights, it belongs to the next job, so
    that the job of the sparse phase never has more of them.
    """
    if stop >= schedule.total_steps:
        return None
    return stop - 1 if schedule.at(stop).sparsity < schedule.at(stop - 1).sparsity else stop
