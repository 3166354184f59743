"""The command-line tools; each runs as ``python -m nonlocal_det.tools.NAME``."""
