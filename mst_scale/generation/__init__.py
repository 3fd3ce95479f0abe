"""Generates text from a trained GPT, from its sparse weights alone.

sparse_matrix   a matrix as its nonzero values and their places, and the product of a few tokens with it
cache           keys and values of the tokens so far; which of them a pattern lets a query see
decoder         the GPT as these two compute it, one token at a time
fused           all its blocks for one token, in one call of the compiled kernel
sampling        which token follows: the most likely one, or one drawn by a temperature
tokens          text to token ids and back
generate        `mst_scale.generate`: a prompt and what follows it
"""
