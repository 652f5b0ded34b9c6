"""The same events made from a configuration alone, without a compiler."""
