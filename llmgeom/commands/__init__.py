"""One module a command of `llmgeom`: its configuration, and the run from there to a record and a page."""
