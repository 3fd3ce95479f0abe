"""Compact files: a sparse model as one safetensors file that holds its nonzero weights and packed mask bits.

layout    the file, written and read with torch and safetensors alone
weights   the weights of a GPT or BERT, from a run, a compact file or a folder of transformers
export    a run as a compact file
"""
