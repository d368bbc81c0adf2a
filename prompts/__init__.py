"""Natural-language sources: domains of hand-written templates, pools, processes in text, and prompts from files."""
