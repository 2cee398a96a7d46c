"""The parts of a program: told by where in the model an operation comes from."""

import re

_PARTS = (
    ("loss", r"cross_entropy|per_token|augmented"),
    ("optimiser", r"optimizer"),
    ("table gradient", r"table_gradient"),
    ("attention", r"attention"),
    ("feed-forward", r"feed_forward"),
    ("scores", r"\bscores\b"),
    ("lookups", r"lookup|touched"),
    ("trunk", r"trunk"),
)


def part_of(origin: str) -> str:
    """The part of the model that an operation of that origin belongs to."""
    for part, pattern in _PARTS:
        if re.search(pattern, origin):
            backward = " (backward)" if "transpose(" in origin and part != "table gradient" else ""
            return part + backward
    return "other" if origin else "unnamed"
