"""The pure core: bits of tensors, digests, patches, codecs and the patch file. No I/O but reading what it is given."""
