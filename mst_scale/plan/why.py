"""Says in words why a configuration is recommended and what the next ones would cost."""

from __future__ import annotations

from collections.abc import Sequence

from mst_scale.plan.clock import Seconds
from mst_scale.plan.recommend import CLOSE, Choice, keeps
from mst_scale.plan.setting import Setting

LEAST = 0.005  # of a step: what is worth a word


def why(recommended: Choice, rows: Sequence[Choice], setting: Setting, fixed: bool = False) -> list[str]:
    """One sentence for the winner, one for the runner-up, one for a pipeline that is faster but not proposed."""
    won = recommended.setting
    others = [row for row in rows if row.setting.sizes != won.sizes]
    allowed = [row for row in others if keeps(row.setting, setting) or won.pipeline > 1]
    said = [_reason(recommended, others, fixed)]
    if allowed:
        said.append(f"next: {_against(allowed[0], recommended)}")
    faster = [row for row in others if row not in allowed and row.seconds.total < recommended.seconds.total]
    if faster:
        said.append(
            f"not proposed: {_against(faster[0], recommended)}; at its ZeRO stage masks need gradients added up in "
            f"{faster[0].setting.accumulate}, not in {setting.accumulate} (--pp {faster[0].setting.pipeline} plans it)"
        )
    return said


def shape(s: Setting) -> str:
    """tensor 8 × pipeline 2 × data 4."""
    cuts = [] if s.sizes.model == 1 else [s.sizes.describe()]
    return " × ".join([*cuts, f"data {s.data}"])


def _reason(recommended: Choice, others: Sequence[Choice], fixed: bool) -> str:
    s, t = recommended.setting, recommended.seconds
    if s.ranks == 1:
        return "one GPU shares nothing"
    zero = t.communication - t.sharing
    if s.sizes.model == 1:
        shown = t.exposed - t.sharing
        behind = f"{_share(zero - shown, zero)} of ZeRO's communication hides behind backward"
        return f"{shape(s)}: no layer waits for another GPU, {behind}"
    plain = next((row for row in others if row.setting.sizes.model == 1), None)
    if plain is None and fixed:
        ways = f"the best of {len(others) + 1} ways with" if others else "the only way with"
        return f"{shape(s)}: {ways} what is fixed"
    if plain is None:
        return f"{shape(s)}: without sharing the model nothing fits at this batch"
    return f"{shape(s)}: against data {plain.setting.data} alone it saves {_words(t, plain.seconds)}"


def _against(row: Choice, best: Choice) -> str:
    now, then = best.seconds.total, row.seconds.total
    more = f"{100 * (then / now - 1):+.1f} %" if abs(then / now - 1) >= 0.0005 else "as fast"
    more += " (too close for the clock)" if now > then * 1.0005 and now <= then * (1 + CLOSE) else ""
    reasons = [
        f"{_words(best.seconds, row.seconds)} more" if _gains(best.seconds, row.seconds) else "",
        f"{_words(row.seconds, best.seconds)} less" if _gains(row.seconds, best.seconds) else "",
    ]
    return f"{shape(row.setting)}, ZeRO-{row.setting.stage}: {more}" + "".join(f", {x}" for x in reasons if x)


def _parts(t: Seconds) -> dict[str, float]:
    return {
        "of matrix products": t.products + t.attention,
        "of element-wise passes": t.elementwise,
        "of exchange inside layers": t.sharing,
        "of ZeRO's communication": t.exposed - t.sharing,
        "of bubble": t.bubble,
        "of updates": t.optimizer + t.host,
    }


def _gains(less: Seconds, more: Seconds) -> dict[str, float]:
    """Seconds by part that one takes more than another, where it is worth a word; the most first."""
    before = _parts(less)
    gains = {name: value - before[name] for name, value in _parts(more).items()}
    worth = LEAST * less.total
    return dict(sorted(((n, x) for n, x in gains.items() if x > worth), key=lambda pair: -pair[1])[:2])


def _words(less: Seconds, more: Seconds) -> str:
    gains = _gains(less, more)
    return " and ".join(f"{_time(x)} {name}" for name, x in gains.items()) or "nothing that counts"


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if part < whole else "all"
