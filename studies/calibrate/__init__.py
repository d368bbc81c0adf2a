"""Which metrics tell models that infer from models that do something else: `python -m studies.calibrate`."""
