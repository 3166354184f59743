"""What a conversion did: where every tensor of the file went, and what the config was told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nonlocal_det.convert.draft import COUNTER


@dataclass(frozen=True)
class Move:
    """A tensor that was written."""

    origin: str  # its name in the file; "" where the file has none and a neutral value was filled in
    target: str  # its name in the checkpoint that was written
    shape: Sequence[int]  # of the target
    how: str = ""  # what was done to it besides renaming

    def __str__(self) -> str:
        how = f" ({self.how})" if self.how else ""
        return f"{self.origin or '(not in the file)'} -> {self.target} {list(self.shape)}{how}"


@dataclass(frozen=True)
class Setting:
    """A config key that the weights ask for."""

    before: Any  # the value in the config that was given
    value: Any  # the value in the YAML that was written
    why: str  # what asks for it


@dataclass
class ConversionReport:
    """The outcome of a conversion. As text, tensors that keep their names and counters are only counted."""

    path: str  # the file that was read
    source: str  # whose weights they are
    moves: list[Move] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # name in the file -> why it was not needed
    #: reason -> names of the model that the file has nothing for, as it should be
    expected: dict[str, list[str]] = field(default_factory=dict)
    #: config key -> what the weights ask for, where the config says something else
    settings: dict[str, Setting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what the user should know
    written: list[str] = field(default_factory=list)  # names of files

    def __str__(self) -> str:
        lines = [f"{self.path}: weights of {self.source}", *self._moved(), *self._skipped()]
        for reason, names in self.expected.items():
            modules = dict.fromkeys(name.rpartition(".")[0] or name for name in names)
            lines.append(f"  (not in the file) {len(names)} new, {reason}: {', '.join(modules)}")
        lines.append(
            f"{sum(bool(move.origin) for move in self.moves)} tensors converted, "
            f"{sum(not move.origin for move in self.moves)} filled in, {len(self.skipped)} not needed, "
            f"{sum(map(len, self.expected.values()))} of the model new"
        )
        for key, setting in self.settings.items():
            lines.append(f"set: {key} {setting.value!r} (was {setting.before!r}): {setting.why}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *(f"wrote {name}" for name in self.written)])

    def _moved(self) -> list[str]:
        """Return a line for every tensor that got another name, and one for each kind of the rest."""
        renamed, alike = [], Counter()
        for move in self.moves:
            if not move.origin:
                alike[f"(not in the file) {{}} filled in: {move.how}"] += 1
            elif move.origin == move.target and not move.how:
                alike["{} tensors keep their names"] += 1
            elif move.target.endswith(COUNTER):
                alike[f"{{}} {COUNTER} of norms go with them"] += 1
            else:
                renamed.append(f"  {move}")
        return renamed + [f"  {kind.format(count)}" for kind, count in alike.items()]

    def _skipped(self) -> list[str]:
        """Return a line for every tensor that was not needed, and one for the counters of each reason."""
        lines = [f"  {n}: not needed: {why}" for n, why in self.skipped.items() if not n.endswith(COUNTER)]
        counters = Counter(why for name, why in self.skipped.items() if name.endswith(COUNTER))
        return lines + [f"  {count} {COUNTER}: not needed: {why}" for why, count in counters.items()]
