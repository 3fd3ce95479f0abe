"""Run logging: metrics, TensorBoard, snapshots, run.json and the progress of a run.

metrics     metrics.jsonl, one row per logged step; a full disk does not end a run
record      writes rows to metrics.jsonl, TensorBoard and the progress line; the summary, compared with a baseline
progress    shows the phases of startup and the progress line; compares the times of sparse and dense steps
observer    observes weights and masks during training: histograms, pictures, snapshots
snapshots   small pictures of weights at the ends of phases
run_file    run.json: versions, hosts, every start, and events
operations  the health file, the log of events, and the command that runs for each event
out_lock    a lock that allows one run at a time in a folder
"""
