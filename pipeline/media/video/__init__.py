"""Videos: files to clips of RGB frames, in a process of their own."""
