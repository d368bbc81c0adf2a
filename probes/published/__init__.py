"""Probes that measure as the papers and their code define it, flaws included: `--protocol published`.

Their numbers have the same controls and shuffled prompts as the sound ones, but no claims: the value of a flawed
definition on an untrained model is part of the result.
"""
