"""Probes that measure as the trilogy's papers and code define it, flaws included: `--protocol published`.

Their numbers go through the same controls and shuffled prompts as the sound ones, and carry no claim: what a flawed
definition gives on an untrained model is part of the answer.
"""
