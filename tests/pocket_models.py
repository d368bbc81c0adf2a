"""Training data by its settings, each made once, and the losses of an examination."""

import gzip
import json
from functools import cache

from studies.training_data import training_data

shared = cache(training_data)  # a tokenizer is learnt once for all tests that read the same text


def examined(folder):
    lines = gzip.decompress((folder / "examination.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in lines.splitlines()]
