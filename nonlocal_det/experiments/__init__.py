"""Controlled comparisons: arms x seeds trained alike, their statistics, tables and figures."""
