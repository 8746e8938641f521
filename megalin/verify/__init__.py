"""The proof command: a model on the asked mesh against one process, tensor by tensor."""
