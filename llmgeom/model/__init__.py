"""A language model and one way to read it: loading, capturing, editing, and the check of both at load."""
