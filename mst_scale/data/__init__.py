"""Turns text into token ids, and fixes the order in which a run sees them.

sampler     the tokens that position p of step s sees: a pure function, the same for any number of ranks
masking     the tokens that BERT has to predict, and what it sees in their place: a pure function too
corpus      what a corpus folder is: open, check, verify; one made by nanoGPT works too
prepare     a recipe → a corpus folder, on all cores, in bounded memory (`mst data`)
  recipe      what decides every byte of it: source, split, tokenizer
  locate      where the named source lies: the hub, files, the running Python's own library
  sources     what a source is, and which documents are for validation; with text_files, json_lines, tables
  cutting     where a long text may be cut without changing its ids
  tokenizer   text → ids: `byte`, tiktoken's encodings, a local rank file, BERT's word pieces
  word_pieces, tokenizer_files  BERT's; any of them as files that transformers reads
  pool        one function over many chunks on all cores, results in order
  partial     how the folder appears all at once, though a run may be killed at any moment
  reporting   the progress that is shown meanwhile

Nothing is imported here: preparing needs no torch, sampling needs no `datasets`.
"""
