"""Whole measurements: each module runs one, from plan to record, and says what it made."""
