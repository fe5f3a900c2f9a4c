"""Tables as LaTeX with booktabs rules, ready for \\input; needs no package but booktabs."""

from __future__ import annotations

import re

import pandas as pd

from workbench.report.document import Table

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": "$-$", "±": r"$\pm$", "×": r"$\times$", "–": "--",
    "…": r"\dots{}", "≤": r"$\le$", "≥": r"$\ge$", "α": r"$\alpha$", "β": r"$\beta$", "Σ": r"$\Sigma$", "·": r"$\cdot$",
    "<": r"$<$", ">": r"$>$", "\u00a0": "~", "\u202f": r"\,",
}  # fmt: skip
_PATTERN = re.compile("|".join(re.escape(character) for character in _SPECIAL))


def escape(text: str) -> str:
    """The text with every character that LaTeX would read as a command made literal."""
    return _PATTERN.sub(lambda found: _SPECIAL[found[0]], text)


def emphasis(text: str) -> str:
    """Escaped text with the document's marks: ``*emphasis*`` and ```code```."""
    escaped = escape(text)
    escaped = re.sub(r"\*([^*]+)\*", r"\\emph{\1}", escaped)
    return re.sub(r"`([^`]+)`", r"\\texttt{\1}", escaped)


def to_latex(table: Table) -> str:
    """A floating table: caption, label ``tab:<id>``, booktabs rules."""
    shown = pd.DataFrame(
        [[escape(column.show(row[column.key])) for column in table.columns] for _, row in table.frame.iterrows()],
        columns=[escape(column.heading) for column in table.columns],
    )
    body = shown.to_latex(
        index=False,
        escape=False,
        column_format="".join("l" if column.align == "left" else "r" for column in table.columns),
        caption=f"{emphasis(table.title)}. {emphasis(table.caption)}",
        label=f"tab:{table.id}",
        position="tb",
    )
    return f"% needs \\usepackage{{booktabs}}\n{body}"
