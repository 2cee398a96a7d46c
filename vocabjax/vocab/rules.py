"""Which parts may be combined, which may not, and why: the only place that says so."""

from collections.abc import Mapping

import jax

from vocabjax.errors import UserError
from vocabjax.vocab.interfaces import HeadConfig, InputConfig, Objective


def require_pair(
    input: InputConfig,
    head: HeadConfig,
    lent: Mapping[str, jax.ShapeDtypeStruct],
    width: int,
    *,
    composed: bool,
) -> None:
    """Refuses a head that cannot score against what its input lends.

    Args:
      lent: what the input lends, by name: shapes alone.
      width: D.
      composed: whether the input's rows are made of other tables' rows, and stored nowhere.

    Raises:
      UserError: names both parts, what is missing, and what to use instead.
    """
    pair = f"vocab.head of kind {head.kind!r} on vocab.input of kind {input.kind!r}"
    missing = [name for name in head.needs if name not in lent]
    if missing:
        offers = f"lends {', '.join(lent)}" if lent else "lends nothing"
        raise UserError(
            f"{pair}: the head needs the input's {' and '.join(missing)}, but that input {offers}; use an untied head, or "
            "an input that lends it"
        )
    if head.needs == ("table",) and lent["table"].shape[-1] != width:
        raise UserError(
            f"{pair}: the head scores hidden states of width {width}, but the input's rows have width "
            f"{lent['table'].shape[-1]}; use a head that projects them (factorized_tied, albert), or an untied head"
        )
    if composed and head.tied and getattr(head, "centre", False):
        raise UserError(
            f"{pair}: centre moves the rows that are scored against, and here none are stored; use mean_penalty, or an input "
            "of kind 'full'"
        )


def require_objective(
    head: HeadConfig,
    objective: Objective,
    input: InputConfig,
    lent: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    """Refuses an objective that this head's loss does not define.

    Raises:
      UserError: names the setting, the head, and what to use instead.
    """
    for name in sorted(objective.terms - head.honours):
        if getattr(objective, name):
            raise UserError(
                f"vocab.objective.{name} = {getattr(objective, name)} is not defined for vocab.head of kind {head.kind!r}; "
                "set it to 0, or use a head of one softmax (tied, untied, …)"
            )
    if objective.augmented and "table" not in lent:
        raise UserError(
            f"vocab.objective.augmented needs the input's table, which vocab.input of kind {input.kind!r} does not lend; set "
            "it to 0, or use an input that lends one (full)"
        )
