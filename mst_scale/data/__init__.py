"""Turns text into token ids, and fixes the order in which a run sees them.

sampler     the tokens that position p of step s sees, and which of them BERT predicts: pure functions
corpus      corpus folders: open, verify, write
prepare     a recipe → a corpus folder, on all cores, in bounded memory (`mst data`)
recipe      which text, how it is split and tokenized, and where it is: the hub, files, an installed package
sources     the documents of a source in chunks, and which of them are for validation
tokenizer   text → ids: `byte`, tiktoken's encodings, a local rank file, BERT's word pieces; and transformers' files

Nothing is imported here: preparing needs no torch, sampling needs no `datasets`.
"""
