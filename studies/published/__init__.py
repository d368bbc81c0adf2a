"""The papers' definitions of focus, keys and values, flaws included: probes for `run_probes` (studies/reproduce.py)."""

from pathlib import Path

CLAIMS_FOLDER = Path(__file__).parents[1] / "claims"
