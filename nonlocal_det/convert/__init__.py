"""Conversion of other programs' weights to ours, and back."""

from __future__ import annotations

from nonlocal_det.convert.conversion import TARGETS, convert_checkpoint
from nonlocal_det.convert.conversion_report import ConversionReport, Move, Setting
from nonlocal_det.convert.sources import SOURCES

__all__ = [
    "SOURCES",
    "TARGETS",
    "ConversionReport",
    "Move",
    "Setting",
    "convert_checkpoint",
]
