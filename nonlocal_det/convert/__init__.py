"""Conversion of other programs' weights to ours, and back."""
