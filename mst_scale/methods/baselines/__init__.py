"""Baselines with their own code. The `METHODS` of each file have the preset, citation and options of its methods.

powerprop, spartan, top_kast, n_of_m  transform the stored weights, or select the largest ones
monarch, pixelfly                     replace a matrix by structured factors
larger_models                         stack the layers of a smaller run, or map its weights (stack, expand, ligo)
"""

BASELINES = {
    "ligo": "larger_models",
    "monarch": "monarch",
    "pixelfly": "pixelfly",
    "powerprop": "powerprop",
    "s-ste": "n_of_m",
    "spartan": "spartan",
    "sr-ste": "n_of_m",
    "expand": "larger_models",
    "stack": "larger_models",
    "top-kast": "top_kast",
}
"""The file of each baseline."""
