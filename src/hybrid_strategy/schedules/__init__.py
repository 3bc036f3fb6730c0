"""Schedules: one file each, a pure function from sizes to a table of cells."""
