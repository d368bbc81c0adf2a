"""`python -m llmgeom` is `llmgeom`."""

from llmgeom.cli import main

main()
