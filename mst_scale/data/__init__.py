"""Where does text become token ids, and in which order does a run see them?

sampler     which tokens does position p of step s see? A pure function, the same for any number of ranks
masking     and which of them does BERT have to guess, seeing what? The same
corpus      what a corpus folder is: open, check, verify; one made by nanoGPT works too
prepare     a recipe → a corpus folder, on all cores, in bounded memory (`mst data`)
  recipe      what decides every byte of it: source, split, tokenizer
  locate      where the named source lies: the hub, files, the running Python's own library
  sources     what a source is, and which documents are for validation; with text_files, json_lines, tables
  cutting     where a long text may be cut without changing its ids
  tokenizer   text → ids: `byte`, tiktoken's encodings, a local rank file, BERT's word pieces
  pool        one function over many chunks on all cores, results in order
  partial     how the folder appears all at once, though a run may be killed at any moment
  reporting   what one sees meanwhile

Nothing is imported here: preparing needs no torch, sampling needs no `datasets`.
"""
