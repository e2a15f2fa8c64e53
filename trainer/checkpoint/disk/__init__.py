"""What "committed" means: files, manifests, and the one rename that makes a checkpoint valid."""
