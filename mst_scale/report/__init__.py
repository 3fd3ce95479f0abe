"""Turns a run's folder into a page of figures.

reading, thinned, groups   metrics of any length in bounded memory; runs that differ in their seed
frontier                   what a loss costs beside dense training
from_checkpoint            weights where a run has no snapshots
style                      palettes, light and dark; drawing to PNG, SVG and into the page
curves, topology, weights  the figures; phases: what is shaded behind them
table, facts               what a run reached and cost; how it was made
page, build                HTML, and what calls what
"""
