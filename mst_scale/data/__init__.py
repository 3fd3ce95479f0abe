"""Turns text into token ids, and fixes the order in which a run sees them.

sampler       the tokens that position p of step s sees, and which of them BERT predicts: pure functions
corpus        corpus folders: open, verify, write
prepare       a recipe → a corpus folder, on all cores, in bounded memory (`mst data`)
tables        sources in Parquet files, on the hub, and in other files that `datasets` reads
sources       the documents of a source in pieces, and which of them are for validation
source_files  which files a source stands for, and how each is read
recipe        what decides every byte of a corpus: which text, how it is split and tokenized
tokenizer     text → ids: `byte`, tiktoken's encodings, a local rank file, BERT's word pieces; and transformers' files

Nothing is imported here: preparing needs no torch, sampling needs no `datasets`.
"""
