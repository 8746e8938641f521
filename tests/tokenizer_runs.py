"""A finished run with another tokenizer: one whose decoder drops the first space of a text, and which may add BOS."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

BEGIN, END = "<s>", "</s>"
BEGIN_ID, SPACE_ID, END_ID = 32, 33, 256


def characters(*, begin: bool) -> Tokenizer:
    """A token for each character from "@" to "~", with its code as id, the mark of a space, and words that begin with
    one for all other ids, as the model of the tiny run writes them; `begin` adds BOS to each text."""
    vocabulary = {f"▁w{code}": code for code in range(257) if code not in (SPACE_ID, BEGIN_ID, END_ID)}
    vocabulary = {token: code for token, code in vocabulary.items() if not 64 <= code < 127}
    vocabulary |= {chr(code): code for code in range(64, 127)} | {"▁": SPACE_ID, BEGIN: BEGIN_ID, END: END_ID}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="▁w0"))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    library.add_special_tokens([BEGIN, END])
    if begin:
        library.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, BEGIN_ID)])
    return library


def with_tokenizer(trained: Path, folder: Path, library: Tokenizer, *keys: str) -> Path:
    """Makes the folder of a run with the weights of `trained`; `keys` are further lines of the table [data]."""
    folder.mkdir()
    (folder / "checkpoints").symlink_to(trained / "checkpoints")
    library.save(str(folder / "tokenizer.json"))
    lines = [f'tokenizer = "{folder / "tokenizer.json"}"', f'eod_token = "{END}"', *keys]
    text = (trained / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace('tokenizer = "bytes"', "\n".join(lines)))
    return folder
