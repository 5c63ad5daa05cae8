"""What we know of other libraries, a module each. None is imported unless its objects are at hand."""
