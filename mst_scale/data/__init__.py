"""Where does text become token ids, and in which order does a run see them?

tokenizer   text → ids: `byte`, tiktoken's encodings, a local rank file
sources     where documents come from: the hub, local files, the running Python's own library
pool        one function over many chunks on all cores, results in order, bounded memory
prepare     source + tokenizer → a corpus folder, atomically (`mst data`)
corpus      what a corpus folder is: open, check, verify; a folder made by nanoGPT works too
sampler     which tokens does position p of step s see? A pure function, the same for any number of ranks

Nothing is imported here: preparing needs no torch, sampling needs no `datasets`.
"""
