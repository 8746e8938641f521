"""Generated evaluation tasks: deterministic examples whose answers follow from the prompt."""
