"""What a command will run, what that costs and what it can find, from config, tokenizer and prompts alone."""
