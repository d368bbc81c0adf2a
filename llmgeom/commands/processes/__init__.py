"""`llmgeom evidence --process`: its flags, a record for each process, and the search for where a model breaks."""
