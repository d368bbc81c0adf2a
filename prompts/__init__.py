"""Natural-language sources: domains of hand-written templates, pools, and prompts read from files."""
