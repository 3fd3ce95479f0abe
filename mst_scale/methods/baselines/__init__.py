"""Baselines that come with code. Each file has the preset, citation and options of its methods, in `METHODS`.

powerprop, spartan, top_kast, n_of_m  the stored weights, transformed or with only the largest of them
monarch, pixelfly                     structured factors in place of a matrix
larger_models                         the weights of a smaller run, stacked or mapped (stack, ligo)
"""

BASELINES = {
    "ligo": "larger_models",
    "monarch": "monarch",
    "pixelfly": "pixelfly",
    "powerprop": "powerprop",
    "s-ste": "n_of_m",
    "spartan": "spartan",
    "sr-ste": "n_of_m",
    "stack": "larger_models",
    "top-kast": "top_kast",
}
"""The file of each baseline."""
