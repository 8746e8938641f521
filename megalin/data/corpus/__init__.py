"""Offline work on text corpora: reading, cleaning, deduplication and selection in resumable parts."""
