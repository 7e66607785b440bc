"""Pages for a browser: one file each, without libraries and without requests to other hosts."""
