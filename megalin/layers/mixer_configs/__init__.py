"""Configs of the mixers: module X has the config of `type = "X"`, without torch; mixers/X.py has the mixer."""
