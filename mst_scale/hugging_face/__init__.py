"""Models to and from the Hugging Face world.

gpt2_names  bert_names   which tensor of ours is which of theirs
export      model_card   a run as a folder that transformers loads
transformers_source      a checkpoint of a model of transformers (Trainer, Accelerate, a loop of your own) …
export_transformers      … and that as a folder
safetensors_stream       a large file, one tensor at a time
start_from               weights to start a run from (--init)
merge_adapters           LoRA's adapters into a sparse base whose zeros stay
hub                      whether the hub can be reached
"""
