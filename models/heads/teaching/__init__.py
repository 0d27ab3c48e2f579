"""Parts of training: losses in chunks, states of the target on disk, and drafters cut from a target."""
