"""What a job requests of Ray, what Ray has, and the GPUs of each actor (`num_gpus: auto`)."""
