"""Configs of other systems as megalin's: Megatron-LM's command lines and YAML, and DeepSpeed's JSON."""
