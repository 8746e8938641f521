"""Text corpora before tokenization: reading, cleaning, deduplication and selection in resumable parts."""
