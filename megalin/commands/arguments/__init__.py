"""Names, help texts and arguments of the commands. Nothing here imports torch, so that help is printed at once."""
