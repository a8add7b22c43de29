"""What engines of Python libraries with data-parallel ranks have in common."""
